// NVRTC's interface over the system's C++ compiler: what comes out is a shared object for the emulated driver.
//
// The machine's headers lie in this library's folder, the machine itself in the driver beside it. CXX names another compiler than c++;
// with NVIDIA_EMULATOR_KEEP the translated texts stay in /tmp.

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../machine/machine.h"
#include "translate.h"

namespace {

enum Status { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

constexpr int CAPABILITIES[] = {80, 86, 89, 90, 100, 120};

// What is compiled once is not run often: optimising it further takes longer than it saves.
constexpr char FLAGS[] = " -O1 -march=native -fPIC -shared -fno-gnu-unique -fno-strict-aliasing -w -Wl,-Bsymbolic,-z,start-stop-visibility=hidden ";

struct Program {
    std::string text, log, code;
};

std::string folder() {
    Dl_info info;
    dladdr((void*)folder, &info);
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/') + 1);
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// Runs a program; gives what it says, and sets whether it succeeded.
std::string run(const std::string& command, bool& succeeded) {
    std::string said;
    FILE* pipe = popen((command + " 2>&1").c_str(), "r");
    char part[4096];
    while (size_t count = pipe ? fread(part, 1, sizeof part, pipe) : 0) said.append(part, count);
    int status = pipe ? pclose(pipe) : -1;
    succeeded = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    return said;
}

/// NVRTC's options: those for the preprocessor, the language, the architecture. False if one is not known.
struct Options {
    std::string defines, standard;
    int capability = 0;

    bool read(const std::string& option) {
        auto begins = [&](const char* with) { return option.compare(0, strlen(with), with) == 0; };
        if (begins("-D")) {
            defines += " '" + option + "'";
        } else if (begins("--std=c++")) {
            standard = " -std=gnu++" + option.substr(strlen("--std=c++"));
        } else if (begins("--gpu-architecture=sm_")) {
            capability = atoi(option.c_str() + strlen("--gpu-architecture=sm_"));
        } else {
            return begins("--device-as-default-execution-space") || begins("--ptxas-options=") || begins("--no-cache");
        }
        return true;
    }
};

/// What the assembler of the real one says of a kernel: registers as many as its threads can have, and its static arrays.
std::string account(const std::string& library, const std::vector<Kernel>& kernels) {
    std::ostringstream log;
    void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!opened) return std::string("cannot be loaded: ") + dlerror();
    for (const auto& [name, threads] : kernels) {
        auto entry = (const machine::Entry*)dlsym(opened, (name + "_entry").c_str());
        if (!entry) continue;
        int registers = 65536 / entry->threads / 8 * 8;
        log << "ptxas info    : Compiling entry function '" << name << "' for 'sm_" << entry->arch << "'\n"
            << "ptxas info    : Function properties for " << name << "\n"
            << "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            << "ptxas info    : Used " << (registers < 255 ? registers : 255) << " registers, "
            << entry->static_end - entry->static_begin << " bytes smem\n";
    }
    dlclose(opened);
    return log.str();
}

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    *major = 13;
    *minor = 0;
    return SUCCESS;
}

int nvrtcGetNumSupportedArchs(int* count) {
    *count = (int)std::size(CAPABILITIES);
    return SUCCESS;
}

int nvrtcGetSupportedArchs(int* capabilities) {
    std::copy(std::begin(CAPABILITIES), std::end(CAPABILITIES), capabilities);
    return SUCCESS;
}

int nvrtcCreateProgram(Program** program, const char* text, const char*, int headers, const char* const*, const char* const*) {
    if (!text || headers != 0) return INVALID_INPUT;
    *program = new Program{text, {}, {}};
    return SUCCESS;
}

int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* given) {
    if (!program) return INVALID_PROGRAM;
    Options options;
    for (int i = 0; i < count; i++) {
        if (!options.read(given[i])) return INVALID_OPTION;
    }
    char work[] = "/tmp/emulated-nvrtc-XXXXXX";
    if (!mkdtemp(work)) return INVALID_INPUT;
    std::string text = std::string(work) + "/kernel.cc", library = std::string(work) + "/kernel.so", here = folder();
    const char* named = getenv("CXX");
    std::string compiler = named ? named : "c++";
    write_file(text, program->text);
    bool succeeded = false;
    program->log = run(compiler + options.standard + options.defines + " -D__CUDA_ARCH__=" + std::to_string(options.capability * 10) +
                           " -E -include " + here + "device/cuda.h -include " + here + "device/entry.h " + text, succeeded);
    std::vector<Kernel> kernels;
    if (succeeded) {
        try {
            std::string translated = translate(program->log, kernels);
            for (const auto& [name, threads] : kernels) {
                translated += "extern \"C\" const machine::Entry " + name + "_entry = machine::entry_of<" + name + ">(" + name + ", " +
                              threads + ", " + std::to_string(options.capability) + ");\n";
            }
            write_file(text, translated);
            program->log = run(compiler + options.standard + FLAGS + text + " " + here + "libcuda.so.1 -o " + library, succeeded);
        } catch (const std::runtime_error& error) {
            program->log = std::string("error: ") + error.what();
            succeeded = false;
        }
    }
    if (succeeded) {
        program->log += account(library, kernels);
        program->code = read_file(library);
    }
    if (!getenv("NVIDIA_EMULATOR_KEEP")) std::filesystem::remove_all(work);
    return succeeded ? SUCCESS : COMPILATION;
}

int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    *bytes = program->log.size() + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(Program* program, char* log) {
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}

int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
    *bytes = program->code.size();
    return SUCCESS;
}

int nvrtcGetCUBIN(Program* program, char* code) {
    memcpy(code, program->code.data(), program->code.size());
    return SUCCESS;
}

// There is no portable code.
int nvrtcGetPTXSize(Program*, size_t*) { return INVALID_PROGRAM; }
int nvrtcGetPTX(Program*, char*) { return INVALID_PROGRAM; }

}  // extern "C"
