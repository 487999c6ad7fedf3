//! Counting what was checked.

use std::collections::BTreeMap;
use std::fmt::{self, Debug};

use crate::table::{Row, Table};

/// A place where this crate departs from vLLM on purpose.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rule {
    pub(crate) name: &'static str,
    pub(crate) why: &'static str,
}

/// What became of one row that is as it should be.
pub(crate) enum Outcome {
    /// Ours is the row's value.
    Equal,
    /// vLLM's value as computed here is the row's, ours follows a rule.
    Deviates(&'static Rule),
    /// The whole row is about something that this crate does not have.
    OutOfScope,
}

/// A row's verdict, or what is wrong.
pub(crate) type Verdict = Result<Outcome, String>;

/// Ours must be the row's value.
pub(crate) fn equal<T: PartialEq + Debug>(row: &T, ours: &T) -> Verdict {
    deviates(row, row, ours, None)
}

/// vLLM's computed value must be the row's; ours as well, unless a rule applies.
pub(crate) fn deviates<T: PartialEq + Debug>(row: &T, vllm: &T, ours: &T, rule: Option<&'static Rule>) -> Verdict {
    if vllm != row {
        return Err(format!("vLLM's value computed as {vllm:?}, but the row has {row:?}"));
    }
    match rule {
        _ if ours == vllm => Ok(Outcome::Equal),
        Some(rule) => Ok(Outcome::Deviates(rule)),
        None => Err(format!("ours is {ours:?}, vLLM's is {vllm:?}")),
    }
}

#[derive(Debug)]
struct Counts {
    kind: String,
    present: usize,
    checked: usize,
    out_of_scope: usize,
}

/// What was checked so far.
#[derive(Debug, Default)]
pub(crate) struct Report {
    tables: Vec<Counts>,
    rules: BTreeMap<&'static Rule, usize>,
    out_of_scope: BTreeMap<&'static str, usize>,
    pub(crate) failures: Vec<String>,
}

impl Report {
    pub(crate) fn begin(&mut self, table: &Table) {
        self.tables.push(Counts { kind: table.kind.clone(), present: table.len(), checked: 0, out_of_scope: 0 });
    }

    /// Checks each row of the table begun last.
    pub(crate) fn rows(&mut self, table: &Table, check: impl Fn(Row<'_>) -> Verdict) {
        self.rows_with(table, |row, _| check(row));
    }

    /// As [`Report::rows`], for checks that themselves note parts of a row as out of scope.
    pub(crate) fn rows_with(&mut self, table: &Table, check: impl Fn(Row<'_>, &mut Self) -> Verdict) {
        for row in table.rows() {
            let verdict = check(row, self);
            let counts = self.tables.last_mut().expect("a table was begun");
            match verdict {
                Ok(Outcome::OutOfScope) => counts.out_of_scope += 1,
                Ok(outcome) => {
                    counts.checked += 1;
                    if let Outcome::Deviates(rule) = outcome {
                        *self.rules.entry(rule).or_default() += 1;
                    }
                }
                Err(problem) => self.failures.push(format!("{}: {row}: {problem}", table.kind)),
            }
        }
    }

    /// Notes an operation that this crate does not have.
    pub(crate) fn out_of_scope(&mut self, what: &'static str) {
        *self.out_of_scope.entry(what).or_default() += 1;
    }

    pub(crate) fn checked(&self) -> usize {
        self.tables.iter().map(|table| table.checked).sum()
    }

    pub(crate) fn present(&self) -> usize {
        self.tables.iter().map(|table| table.present).sum()
    }

    pub(crate) fn out_of_scope_rows(&self) -> usize {
        self.tables.iter().map(|table| table.out_of_scope).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for table in &self.tables {
            writeln!(f, "{}: {} of {}", table.kind, table.checked, table.present)?;
        }
        writeln!(f, "total: {} of {}", self.checked(), self.present())?;
        for (rule, rows) in &self.rules {
            writeln!(f, "deviation `{}`: {rows} rows ({})", rule.name, rule.why)?;
        }
        writeln!(f, "out of scope: {} whole rows", self.out_of_scope_rows())?;
        for (what, operations) in &self.out_of_scope {
            writeln!(f, "out of scope: {what} {operations}")?;
        }
        writeln!(f, "failures: {}", self.failures.len())
    }
}
