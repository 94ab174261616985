#include "trainer/rewards/answer_value.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "base/text.h"

namespace trireme {
namespace {

using Complex = std::complex<long double>;
using Wide = __int128;

constexpr std::array<uint64_t, 2> kPrimes = {2305843009213693951ULL, 2305843009213693921ULL};  // 2^61 - 1, 2^61 - 31
constexpr long double kEpsilon = 1.1e-19L;
constexpr long double kPi = 3.14159265358979323846264338327950288L;
constexpr long double kE = 2.71828182845904523536028747135266250L;

uint64_t multiply_mod(uint64_t a, uint64_t b, uint64_t p) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b % p);
}

uint64_t power_mod(uint64_t base, uint64_t exponent, uint64_t p) {
  uint64_t result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0) result = multiply_mod(result, base, p);
    base = multiply_mod(base, base, p);
  }
  return result;
}

uint64_t to_residue(int64_t value, uint64_t p) {
  const auto magnitude = static_cast<uint64_t>(value < 0 ? -static_cast<Wide>(value) : static_cast<Wide>(value)) % p;
  return value < 0 && magnitude != 0 ? p - magnitude : magnitude;
}

std::optional<Fraction> fraction(Wide numerator, Wide denominator) {
  if (denominator == 0) return std::nullopt;
  if (denominator < 0) {
    numerator = -numerator;
    denominator = -denominator;
  }
  Wide a = numerator < 0 ? -numerator : numerator, b = denominator;
  while (b != 0) {
    const Wide rest = a % b;
    a = b;
    b = rest;
  }
  numerator /= a;
  denominator /= a;
  constexpr Wide kMax = std::numeric_limits<int64_t>::max();
  if (numerator > kMax || numerator < -kMax || denominator > kMax) return std::nullopt;
  return Fraction{static_cast<int64_t>(numerator), static_cast<int64_t>(denominator)};
}

long double relative_error(long double error, const Complex& value) {
  const long double size = std::abs(value);
  return size > 0 ? error / size : (error > 0 ? 1.0L : 0.0L);
}

bool finite(const Complex& v) { return std::isfinite(v.real()) && std::isfinite(v.imag()); }

template <class Operation>
std::optional<std::array<uint64_t, 2>> combine(const Value& a, const Value& b, Operation operation) {
  if (!a.residues || !b.residues) return std::nullopt;
  std::array<uint64_t, 2> out{};
  for (size_t k = 0; k < 2; ++k) {
    const std::optional<uint64_t> r = operation((*a.residues)[k], (*b.residues)[k], kPrimes[k]);
    if (!r) return std::nullopt;
    out[k] = *r;
  }
  return out;
}

// Drops what cannot be used and decides validity.
Value settle(Value v) {
  v.valid = v.residues || finite(v.approximate);
  return v;
}

Value real_value(long double value, long double error) {
  Value v;
  v.approximate = value;
  v.error = error;
  return settle(v);
}

bool is_real(const Value& v) {
  return std::abs(v.approximate.imag()) <= 256 * v.error + 1e-17L * std::abs(v.approximate.real());
}

std::optional<int64_t> as_integer(const Value& v) {
  if (v.valid && v.exact && v.exact->denominator == 1) return v.exact->numerator;
  return std::nullopt;
}

std::optional<int64_t> exact_root(int64_t value, int64_t index) {
  if (value < 0) return std::nullopt;
  const auto guess = static_cast<int64_t>(
      std::llround(std::pow(static_cast<long double>(value), 1.0L / static_cast<long double>(index))));
  for (int64_t r = std::max<int64_t>(0, guess - 1); r <= guess + 1; ++r) {
    Wide p = 1;
    bool over = false;
    for (int64_t k = 0; k < index && !over; ++k) {
      p *= r;
      over = p > value;
    }
    if (!over && p == value) return r;
  }
  return std::nullopt;
}

Value fraction_value(const Fraction& f) { return divide(integer_value(f.numerator), integer_value(f.denominator)); }

}  // namespace

Value integer_value(int64_t value) {
  Value v;
  v.approximate = static_cast<long double>(value);
  v.exact = fraction(value, 1);
  v.residues = {to_residue(value, kPrimes[0]), to_residue(value, kPrimes[1])};
  return settle(v);
}

Value decimal_value(std::string_view digits, std::string_view repeat, int64_t exponent) {
  if (std::abs(static_cast<double>(exponent)) > 1e15) return {};
  Value whole = integer_value(0);
  const auto read = [](std::string_view text) {
    // Long digit strings: the residues and the approximation grow digit by digit, the fraction stops when it overflows.
    Value v;
    v.residues = {0, 0};
    Wide exact = 0;
    bool fits = true;
    long double approximate = 0;
    for (const char c : text) {
      if (c == '.') continue;
      for (size_t k = 0; k < 2; ++k) {
        (*v.residues)[k] =
            (multiply_mod((*v.residues)[k], 10, kPrimes[k]) + static_cast<uint64_t>(c - '0')) % kPrimes[k];
      }
      approximate = approximate * 10 + (c - '0');
      if (fits) exact = exact * 10 + (c - '0');
      fits = fits && exact <= std::numeric_limits<int64_t>::max();
    }
    v.approximate = approximate;
    v.error = static_cast<long double>(text.size()) * kEpsilon * approximate;
    if (fits) {
      v.exact = fraction(exact, 1);
      v.error = 0;
    }
    return settle(v);
  };
  whole = read(digits);
  const size_t dot = digits.find('.');
  int64_t places = dot == std::string_view::npos ? 0 : static_cast<int64_t>(digits.size() - dot - 1);
  const Value ten = integer_value(10);
  if (!repeat.empty()) {  // (digits·10^n + period - digits) / (10^n - 1)
    const Value shift = power(ten, integer_value(static_cast<int64_t>(repeat.size())));
    whole = divide(add(multiply(whole, subtract(shift, integer_value(1))), read(repeat)),
                   subtract(shift, integer_value(1)));
  }
  const int64_t shift = exponent - places;
  if (shift == 0) return whole;
  return shift < 0 ? divide(whole, power(ten, integer_value(-shift)))
                   : multiply(whole, power(ten, integer_value(shift)));
}

Value symbol_value(std::string_view name, int sample) {
  if (name == "i") {
    Value v;
    v.approximate = Complex(0, 1);
    return settle(v);
  }
  const uint64_t seed = hash64(name, 0x9e3779b97f4a7c15ULL);
  // pi and e: the same residue at every sample; no rational relation can hold by accident.
  const bool constant = name == "pi" || name == "e";
  const uint64_t mixed = hash64(std::to_string(seed) + ":" + std::to_string(constant ? 0 : sample), seed | 1);
  Value v;
  v.residues = {mixed % kPrimes[0], hash64("second", mixed) % kPrimes[1]};
  if (name == "pi")
    v.approximate = kPi;
  else if (name == "e")
    v.approximate = kE;
  else {
    const long double unit = static_cast<long double>((mixed >> 20) % 1000003) / 1000003.0L;
    // Small positive, small negative, large, of mixed signs: so that |x - 2| is neither x - 2 nor 2 - x.
    const long double sign = sample == 1 || (sample == 3 && (seed & 1) != 0) ? -1 : 1;
    v.approximate = (0.3L + 1.9L * unit) * sign * (sample == 2 ? 9 : sample == 3 ? 3 : 1);
  }
  v.error = constant ? kEpsilon * std::abs(v.approximate) : 0;
  return settle(v);
}

Value add(const Value& a, const Value& b) {
  if (!a.valid || !b.valid) return {};
  Value v;
  v.approximate = a.approximate + b.approximate;
  v.error = a.error + b.error + kEpsilon * std::abs(v.approximate);
  if (a.exact && b.exact) {
    v.exact = fraction(static_cast<Wide>(a.exact->numerator) * b.exact->denominator +
                           static_cast<Wide>(b.exact->numerator) * a.exact->denominator,
                       static_cast<Wide>(a.exact->denominator) * b.exact->denominator);
  }
  v.residues = combine(a, b, [](uint64_t x, uint64_t y, uint64_t p) { return std::optional<uint64_t>((x + y) % p); });
  return settle(v);
}

Value subtract(const Value& a, const Value& b) { return add(a, multiply(integer_value(-1), b)); }

Value multiply(const Value& a, const Value& b) {
  if (!a.valid || !b.valid) return {};
  Value v;
  v.approximate = a.approximate * b.approximate;
  v.error = std::abs(a.approximate) * b.error + std::abs(b.approximate) * a.error + kEpsilon * std::abs(v.approximate);
  if (a.exact && b.exact) {
    v.exact = fraction(static_cast<Wide>(a.exact->numerator) * b.exact->numerator,
                       static_cast<Wide>(a.exact->denominator) * b.exact->denominator);
  }
  v.residues =
      combine(a, b, [](uint64_t x, uint64_t y, uint64_t p) { return std::optional<uint64_t>(multiply_mod(x, y, p)); });
  return settle(v);
}

Value divide(const Value& a, const Value& b) {
  if (!a.valid || !b.valid || is_zero(b)) return {};
  Value v;
  v.approximate = a.approximate / b.approximate;
  v.error = std::abs(v.approximate) *
            (relative_error(a.error, a.approximate) + relative_error(b.error, b.approximate) + kEpsilon);
  if (a.approximate == Complex(0)) v.error = a.error / std::abs(b.approximate);
  if (a.exact && b.exact) {
    v.exact = fraction(static_cast<Wide>(a.exact->numerator) * b.exact->denominator,
                       static_cast<Wide>(a.exact->denominator) * b.exact->numerator);
  }
  v.residues = combine(a, b, [](uint64_t x, uint64_t y, uint64_t p) -> std::optional<uint64_t> {
    if (y == 0) return std::nullopt;
    return multiply_mod(x, power_mod(y, p - 2, p), p);
  });
  return settle(v);
}

Value power(const Value& base, const Value& exponent) {
  if (!base.valid || !exponent.valid) return {};
  if (const auto n = as_integer(exponent)) {
    if (*n == 0) return is_zero(base) ? Value{} : integer_value(1);
    if (*n < 0 && is_zero(base)) return {};
    const uint64_t magnitude = static_cast<uint64_t>(*n < 0 ? -static_cast<Wide>(*n) : static_cast<Wide>(*n));
    Value v;
    if (magnitude <= 64 && base.exact) {  // exact as long as it fits
      Value product = integer_value(1);
      for (uint64_t k = 0; k < magnitude; ++k) product = multiply(product, base);
      return *n < 0 ? divide(integer_value(1), product) : product;
    }
    Complex square = base.approximate, product = 1;
    for (uint64_t k = magnitude; k > 0; k >>= 1) {
      if ((k & 1) != 0) product *= square;
      square *= square;
    }
    v.approximate = *n < 0 ? Complex(1) / product : product;
    v.error = std::abs(v.approximate) * static_cast<long double>(magnitude) *
              (relative_error(base.error, base.approximate) + 2 * kEpsilon);
    if (base.exact && base.exact->denominator == 1 && (base.exact->numerator == 1 || base.exact->numerator == -1)) {
      v.exact = Fraction{base.exact->numerator == 1 || magnitude % 2 == 0 ? 1 : -1, 1};
    }
    if (base.residues) {
      std::array<uint64_t, 2> out{};
      bool invertible = true;
      for (size_t k = 0; k < 2; ++k) {
        const uint64_t r = power_mod((*base.residues)[k], magnitude, kPrimes[k]);
        invertible = invertible && (*n > 0 || r != 0);
        out[k] = *n < 0 ? power_mod(r, kPrimes[k] - 2, kPrimes[k]) : r;
      }
      if (invertible) v.residues = out;
    }
    return settle(v);
  }
  if (exponent.exact && exponent.exact->denominator <= 64) {
    const Value rooted = root(base, integer_value(exponent.exact->denominator));
    return power(rooted, integer_value(exponent.exact->numerator));
  }
  if (is_zero(base) || !finite(base.approximate) || !finite(exponent.approximate)) return {};
  const bool positive = is_real(base) && base.approximate.real() > 0 && is_real(exponent);
  Value v;
  v.approximate = positive ? Complex(std::pow(base.approximate.real(), exponent.approximate.real()))
                           : std::pow(base.approximate, exponent.approximate);
  const long double logarithm = std::abs(std::log(base.approximate));
  v.error = std::abs(v.approximate) *
            (std::abs(exponent.approximate) * relative_error(base.error, base.approximate) +
             logarithm * exponent.error + 4 * kEpsilon * (1 + logarithm * std::abs(exponent.approximate)));
  return settle(v);
}

Value root(const Value& radicand, const Value& index) {
  const auto n = as_integer(index);
  if (!radicand.valid || !n || *n < 1 || *n > 1000) return {};
  if (*n == 1) return radicand;
  if (is_zero(radicand)) return integer_value(0);
  const bool odd = *n % 2 == 1;
  if (radicand.exact && *n <= 62 && (radicand.exact->numerator > 0 || odd)) {
    const int64_t sign = radicand.exact->numerator < 0 ? -1 : 1;
    const auto top = exact_root(sign * radicand.exact->numerator, *n);
    const auto bottom = exact_root(radicand.exact->denominator, *n);
    if (top && bottom) return fraction_value({sign * *top, *bottom});
  }
  if (!finite(radicand.approximate)) return {};
  Value v;
  const long double inverse = 1.0L / static_cast<long double>(*n);
  const long double real = radicand.approximate.real();
  if (is_real(radicand) && (real > 0 || odd)) {
    const long double size = *n == 2 ? std::sqrt(std::abs(real)) : std::pow(std::abs(real), inverse);
    v.approximate = real < 0 ? -size : size;
  } else {
    v.approximate = *n == 2 ? std::sqrt(radicand.approximate) : std::pow(radicand.approximate, inverse);
  }
  v.error = std::abs(v.approximate) * (relative_error(radicand.error, radicand.approximate) + 8 * kEpsilon);
  return settle(v);
}

Value absolute(const Value& a) {
  if (!a.valid) return {};
  if (a.exact) return a.exact->numerator < 0 ? multiply(integer_value(-1), a) : a;
  if (!finite(a.approximate)) return {};
  return real_value(std::abs(a.approximate), a.error + kEpsilon * std::abs(a.approximate));
}

Value factorial(const Value& a) {
  const auto n = as_integer(a);
  if (!n || *n < 0 || *n > kMaxProductTerms) return {};
  Value product = integer_value(1);
  for (int64_t k = 2; k <= *n; ++k) product = multiply(product, integer_value(k));
  return product;
}

Value binomial(const Value& n, const Value& k) {
  const auto count = as_integer(k);
  if (!n.valid || !count || *count < 0 || *count > kMaxProductTerms) return {};
  Value product = integer_value(1);
  for (int64_t j = 0; j < *count; ++j) {
    product = divide(multiply(product, subtract(n, integer_value(j))), integer_value(j + 1));
  }
  return product;
}

Value round_down(const Value& a) {
  if (!a.valid) return {};
  if (a.exact) {
    const int64_t quotient = a.exact->numerator / a.exact->denominator;
    return integer_value(quotient - (a.exact->numerator % a.exact->denominator < 0 ? 1 : 0));
  }
  const long double real = a.approximate.real();
  if (!is_real(a) || !(std::abs(real) < 1e15L) || std::abs(real - std::round(real)) < 1e-9L) return {};
  return integer_value(static_cast<int64_t>(std::floor(real)));
}

Value round_up(const Value& a) { return multiply(integer_value(-1), round_down(multiply(integer_value(-1), a))); }

Value apply_function(std::string_view name, const Value& argument) {
  if (!argument.valid || !finite(argument.approximate)) return {};
  const Complex x = argument.approximate;
  if (name == "ln" || name == "log" || name == "lg") {
    if (is_zero(argument)) return {};
    if (argument.exact && argument.exact->numerator == 1 && argument.exact->denominator == 1) return integer_value(0);
    Value v;
    v.approximate = is_real(argument) && x.real() > 0 ? Complex(std::log(x.real())) : std::log(x);
    v.error = relative_error(argument.error, x) + kEpsilon * (1 + std::abs(v.approximate));
    v = settle(v);
    return name == "ln" ? v : divide(v, real_value(std::log(10.0L), 3 * kEpsilon));
  }
  Value v;
  long double slope = 1;  // of the function, near enough for the error bound
  if (name == "exp") {
    if (is_zero(argument)) return integer_value(1);
    v.approximate = std::exp(x);
    slope = std::abs(v.approximate);
  } else if (name == "sin")
    v.approximate = std::sin(x);
  else if (name == "cos")
    v.approximate = std::cos(x);
  else if (name == "tan" || name == "cot" || name == "sec" || name == "csc") {
    const Complex s = std::sin(x), c = std::cos(x);
    const Complex bottom = name == "tan" || name == "sec" ? c : s;
    if (std::abs(bottom) < 1e-15L) return {};
    v.approximate = (name == "tan" ? s : name == "cot" ? c : Complex(1)) / bottom;
    slope = 2 / std::norm(bottom);
  } else if (name == "arcsin" || name == "arccos") {
    if (!is_real(argument) || std::abs(x.real()) > 1) return {};
    v.approximate = name == "arcsin" ? std::asin(x.real()) : std::acos(x.real());
    slope = 1 / std::max(1e-9L, std::sqrt(1 - x.real() * x.real()));
  } else if (name == "arctan")
    v.approximate = std::atan(x);
  else if (name == "sinh")
    v.approximate = std::sinh(x), slope = 1 + std::abs(v.approximate);
  else if (name == "cosh")
    v.approximate = std::cosh(x), slope = 1 + std::abs(v.approximate);
  else if (name == "tanh")
    v.approximate = std::tanh(x);
  else
    return {};
  v.error = slope * (argument.error + kEpsilon * std::abs(x)) + 4 * kEpsilon * (1 + std::abs(v.approximate));
  return settle(v);
}

bool is_zero(const Value& a) {
  if (!a.valid) return false;
  if (a.exact) return a.exact->numerator == 0;
  if (a.residues) return (*a.residues)[0] == 0 && (*a.residues)[1] == 0;
  return std::abs(a.approximate) <= 64 * a.error;
}

bool same_value(const Value& a, const Value& b) {
  if (!a.valid || !b.valid) return false;
  if (a.residues && b.residues) return *a.residues == *b.residues;
  if (!finite(a.approximate) || !finite(b.approximate)) return false;
  const long double size = std::max(std::abs(a.approximate), std::abs(b.approximate));
  const long double error = 64 * (a.error + b.error) + 1e-17L * size;
  if (error > 1e-9L * std::max(1.0L, size)) return false;  // too much was cancelled to tell
  return std::abs(a.approximate - b.approximate) <= error;
}

}  // namespace trireme
