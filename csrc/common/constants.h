// Scores are kept in units of log2, because the exponential unit computes 2^x.
#pragma once

namespace common {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

}  // namespace common
