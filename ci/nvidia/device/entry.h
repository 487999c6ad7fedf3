// Makes a compiled kernel known to the driver: the compiler defines an `Entry` behind a kernel's text.
#pragma once

#include "../machine/machine.h"

extern "C" {
[[gnu::weak, gnu::visibility("hidden")]] extern unsigned char __start_shared_memory[], __stop_shared_memory[];
}

namespace machine {

template <int... index>
struct Indices {};
template <int count, int... index>
struct Count : Count<count - 1, count - 1, index...> {};
template <int... index>
struct Count<0, index...> {
    using Type = Indices<index...>;
};

template <auto kernel, typename... Parameters, int... index>
void call_with(void* const* parameters, void (*)(Parameters...), Indices<index...>) {
    kernel(*static_cast<Parameters*>(parameters[index])...);
}
template <auto kernel, typename... Parameters>
Entry entry_of(void (*of)(Parameters...), int threads, int arch) {
    static const size_t bytes[] = {sizeof(Parameters)...};
    auto call = [](void* const* parameters) {
        call_with<kernel>(parameters, decltype(of)(), typename Count<sizeof...(Parameters)>::Type());
    };
    return {call, bytes, sizeof...(Parameters), threads, arch, __start_shared_memory, __stop_shared_memory};
}

}  // namespace machine
