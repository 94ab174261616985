// Numbers for deciding whether two expressions are the same. A value is held three ways at once:
//  - residues modulo two 61-bit primes, when it is a rational function of its symbols: equality there is exact but for
//  a
//    chance of 2^-120, whatever the length of the digits or the size of a power (Schwartz-Zippel);
//  - a fraction of 64-bit integers, while it fits: for exponents, exact roots and "is it a terminating decimal";
//  - a complex long double with a running error bound: for roots, logarithms and the like.
#pragma once

#include <array>
#include <complex>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace trireme {

struct Fraction {
  int64_t numerator = 0;
  int64_t denominator = 1;  // > 0, lowest terms
};

struct Value {
  bool valid = false;                     // false: undefined (a division by zero, a function outside its domain)
  std::complex<long double> approximate;  // may be infinite for huge rational values
  long double error = 0;                  // absolute bound on approximate
  std::optional<Fraction> exact;
  std::optional<std::array<uint64_t, 2>> residues;
};

Value integer_value(int64_t value);
// digits with at most one '.', an optional period and a power of ten.
Value decimal_value(std::string_view digits, std::string_view repeat, int64_t exponent);
// The value of a symbol at sample point `sample`: pseudo-random, different for each name. pi, e and i are themselves.
Value symbol_value(std::string_view name, int sample);

Value add(const Value& a, const Value& b);
Value subtract(const Value& a, const Value& b);
Value multiply(const Value& a, const Value& b);
Value divide(const Value& a, const Value& b);
Value power(const Value& base, const Value& exponent);
Value root(const Value& radicand, const Value& index);  // the real root where there is one
Value absolute(const Value& a);
Value factorial(const Value& a);
Value binomial(const Value& n, const Value& k);
Value round_down(const Value& a);  // floor
Value round_up(const Value& a);
// sin, ..., ln, log (base 10), exp. Not valid for an unknown name.
Value apply_function(std::string_view name, const Value& argument);

// Definitely the same, as far as the three representations can tell.
bool same_value(const Value& a, const Value& b);
bool is_zero(const Value& a);

// Steps a factorial or binomial took, for the caller's budget.
constexpr int64_t kMaxProductTerms = 5000;

}  // namespace trireme
