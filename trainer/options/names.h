// Enums by name: what configurations, messages and tests write for their values.
//
// Beside the enum stands names_of(E): the names in the order of its values, which count from 0. A key of such a type
// takes these names (trainer/config/fields.h).
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

namespace trireme {

using Names = std::span<const char* const>;

template <class E>
concept Named = std::is_enum_v<E> && requires(E value) {
  { names_of(value) } -> std::same_as<Names>;
};

template <Named E>
const char* name_of(E value) {
  return names_of(value)[static_cast<size_t>(value)];
}

}  // namespace trireme
