//! Holds nothing: the comparison is a test.
