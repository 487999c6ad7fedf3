// CUDA C++ to the C++ of the emulated machine.
#pragma once

#include <string>
#include <vector>

/// An entry point, and the expression of the most threads that a block of it has.
struct Kernel {
    std::string name, threads;
};

/// Translates a preprocessed text: inline PTX becomes calls of functions of device/ptx.h, `__shared__` memory of the machine.
/// Throws std::runtime_error where it meets what it does not know.
std::string translate(const std::string& text, std::vector<Kernel>& kernels);
