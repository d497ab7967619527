// Of the standard's <type_traits>, what the kernels use: NVRTC has no such header.
#pragma once

namespace common {

template <class T, class U>
inline constexpr bool is_same_v = false;
template <class T>
inline constexpr bool is_same_v<T, T> = true;

template <bool kFirst, class T, class U>
struct Conditional {
  using Type = T;
};
template <class T, class U>
struct Conditional<false, T, U> {
  using Type = U;
};
template <bool kFirst, class T, class U>
using conditional_t = typename Conditional<kFirst, T, U>::Type;

}  // namespace common
