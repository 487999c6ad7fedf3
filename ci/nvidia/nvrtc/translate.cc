// The translator. An `asm` becomes a call of a function that holds its instructions as statements:
//
//   asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
//                :: "r"(at), "r"(parity) : "memory")
//   [&] { const uint32 a0 = (uint32)(at); const uint32 a1 = (uint32)(parity);
//         { bool done; again: ptx::mbarrier_try_wait_parity_shared_cta_b64(done, a0, a1); if (!done) goto again; } }()
//
// Operands in braces become `ptx::group(...)`, brackets vanish, `_` is `ptx::sink`.

#include "translate.h"

#include <cctype>
#include <cstring>
#include <map>
#include <stdexcept>

namespace {

bool is_word(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$'; }

std::string trimmed(const std::string& text) {
    size_t begin = text.find_first_not_of(" \t\n"), end = text.find_last_not_of(" \t\n");
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

/// Position behind the string literal that begins at `at`.
size_t behind_string(const std::string& text, size_t at) {
    for (at++; text[at] != '"'; at++) at += text[at] == '\\';
    return at + 1;
}

/// Position behind the bracket that closes the one at `at`.
size_t behind_bracket(const std::string& text, size_t at) {
    int depth = 0;
    while (at < text.size()) {
        char c = text[at];
        if (c == '"') {
            at = behind_string(text, at);
            continue;
        }
        depth += strchr("([{", c) != nullptr;
        depth -= strchr(")]}", c) != nullptr;
        at++;
        if (depth == 0) return at;
    }
    throw std::runtime_error("a bracket that is not closed");
}

/// Splits at a separator that is in no brackets and no string.
std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts = {""};
    for (size_t at = 0; at < text.size();) {
        if (text[at] == separator) {
            parts.emplace_back();
            at++;
            continue;
        }
        size_t end = text[at] == '"' ? behind_string(text, at) : strchr("([{", text[at]) ? behind_bracket(text, at) : at + 1;
        parts.back() += text.substr(at, end - at);
        at = end;
    }
    return parts;
}

/// The text of adjacent string literals.
std::string literal(const std::string& text) {
    std::string out;
    for (size_t at = text.find('"'); at != std::string::npos; at = text.find('"', at)) {
        size_t end = behind_string(text, at);
        for (at++; at < end - 1; at++) {
            if (text[at] == '\\') at++;
            out += text[at - 1] != '\\' ? text[at] : text[at] == 'n' ? '\n' : text[at] == 't' ? '\t' : text[at];
        }
        at = end;
    }
    return out;
}

const std::map<std::string, std::string> REGISTERS = {
    {".pred", "bool"}, {".b16", "uint16_t"}, {".b32", "uint32_t"}, {".b64", "uint64_t"}, {".f32", "float"},
};
const std::map<char, std::string> CONSTRAINTS = {{'h', "uint16_t"}, {'r', "uint32_t"}, {'l', "uint64_t"}, {'f', "float"}, {'n', "int"}};

/// Name of the function for an instruction.
std::string function_of(const std::string& mnemonic) {
    std::string name = "ptx::";
    for (size_t i = 0; i < mnemonic.size(); i++) {
        if (mnemonic.compare(i, 2, "::") == 0) i++;
        name += is_word(mnemonic[i]) ? mnemonic[i] : '_';
    }
    return name;
}

/// Operands of an instruction as arguments.
std::string arguments(const std::string& operands) {
    std::string out;
    for (const std::string& part : split(operands, ',')) {
        std::string operand = trimmed(part);
        if (operand.empty()) continue;
        if (!out.empty()) out += ", ";
        if (operand[0] == '[') {
            out += arguments(operand.substr(1, operand.size() - 2));
        } else if (operand[0] == '{') {
            out += "ptx::group(" + arguments(operand.substr(1, operand.size() - 2)) + ")";
        } else if (operand[0] == '%') {
            out += "a" + operand.substr(1);
        } else {
            if (operand.rfind("_|", 0) == 0) operand = operand.substr(2);  // the first of two results is not wanted
            out += operand == "_" ? "ptx::sink" : operand;
        }
    }
    return out;
}

/// One instruction or declaration, without its semicolon.
std::string statement(const std::string& text) {
    size_t end = text.find_first_of(" \t\n");
    std::string word = text.substr(0, end), rest = end == std::string::npos ? "" : trimmed(text.substr(end));
    if (word == ".reg") {
        size_t behind = rest.find_first_of(" \t");
        auto type = REGISTERS.find(rest.substr(0, behind));
        if (type == REGISTERS.end()) throw std::runtime_error("a register of an unknown type: " + text);
        return type->second + " " + rest.substr(behind) + ";";
    }
    if (word[0] == '@') {
        std::string condition = word.substr(1);
        return "if (" + condition + ") " + statement(rest);
    }
    if (word == "bra") return "goto " + rest + ";";
    return function_of(word) + "(" + arguments(rest) + ");";
}

/// PTX as statements.
std::string statements(const std::string& ptx) {
    std::string out;
    for (size_t at = 0; at < ptx.size();) {
        char c = ptx[at];
        if (isspace((unsigned char)c) || c == ';') {
            at++;
            continue;
        }
        if (c == '{' || c == '}') {
            out += c;
            at++;
            continue;
        }
        size_t end = at;
        while (end < ptx.size() && is_word(ptx[end])) end++;
        if (end > at && ptx[end] == ':' && ptx[end + 1] != ':') {
            out += ptx.substr(at, end - at) + ": ";
            at = end + 1;
            continue;
        }
        end = ptx.find(';', at);
        out += statement(trimmed(ptx.substr(at, end - at)));
        at = end == std::string::npos ? ptx.size() : end + 1;
    }
    return out;
}

/// The inside of an `asm ( ... )`.
std::string translated_asm(const std::string& inside) {
    std::vector<std::string> sections = split(inside, ':');
    std::string out = "[&] { ";
    int index = 0;
    for (size_t section = 1; section < sections.size() && section < 3; section++) {
        for (const std::string& part : split(sections[section], ',')) {
            std::string operand = trimmed(part);
            if (operand.empty()) continue;
            size_t end = behind_string(operand, 0);
            std::string constraint = literal(operand.substr(0, end)), expression = trimmed(operand.substr(end));
            std::string name = "a" + std::to_string(index++);
            auto type = CONSTRAINTS.find(constraint.back());
            if (type == CONSTRAINTS.end()) throw std::runtime_error("an operand of an unknown kind: " + operand);
            out += section == 1 ? "auto& " + name + " = " + expression + "; "
                                : "const " + type->second + " " + name + " = (" + type->second + ")" + expression + "; ";
        }
    }
    return out + statements(literal(sections[0])) + " }()";
}

/// Position of a word at or after `at`.
size_t find_word(const std::string& text, const std::string& word, size_t at) {
    for (at = text.find(word, at); at != std::string::npos; at = text.find(word, at + 1)) {
        bool begins = at == 0 || !is_word(text[at - 1]), ends = at + word.size() >= text.size() || !is_word(text[at + word.size()]);
        if (begins && ends) return at;
    }
    return at;
}

/// Replaces a part of a text by another of as many lines.
void replace(std::string& text, size_t begin, size_t end, std::string by) {
    for (size_t i = begin; i < end; i++) {
        if (text[i] == '\n') by += '\n';
    }
    text.replace(begin, end - begin, by);
}

}  // namespace

std::string translate(const std::string& source, std::vector<Kernel>& kernels) {
    std::string text = source;
    for (size_t at = find_word(text, "asm", 0); at != std::string::npos; at = find_word(text, "asm", at + 1)) {
        size_t open = text.find('(', at), end = behind_bracket(text, open);
        replace(text, at, end, translated_asm(text.substr(open + 1, end - open - 2)));
    }
    for (size_t at = find_word(text, "__shared__", 0); at != std::string::npos; at = find_word(text, "__shared__", at + 1)) {
        size_t before = text.rfind("extern", at), end = text.find(';', at);
        if (before == std::string::npos || !trimmed(text.substr(before + 6, at - before - 6)).empty()) {
            replace(text, at, at + strlen("__shared__"), "[[gnu::section(\"shared_memory\")]] static");
            continue;
        }
        size_t bracket = text.rfind('[', end), name = bracket;
        while (is_word(text[name - 1])) name--;
        replace(text, before, end, "unsigned char* " + text.substr(name, bracket - name) + " = machine::here.shared");
    }
    for (size_t at = find_word(text, "__global__", 0); at != std::string::npos; at = find_word(text, "__global__", at + 1)) {
        size_t bounds = find_word(text, "__launch_bounds__", at), open = text.find('(', bounds);
        if (bounds == std::string::npos) throw std::runtime_error("a kernel without __launch_bounds__");
        size_t end = behind_bracket(text, open);
        std::string threads = split(text.substr(open + 1, end - open - 2), ',')[0];
        size_t name = text.find_first_not_of(" \n", end);
        while (text[name] == '#') name = text.find_first_not_of(" \n", text.find('\n', name));
        size_t behind = name;
        while (is_word(text[behind])) behind++;
        kernels.push_back({text.substr(name, behind - name), threads});
        replace(text, bounds, end, "");
        replace(text, at, at + strlen("__global__"), "");
    }
    return text;
}
