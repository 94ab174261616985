#include "trainer/rewards/answer_units.h"

#include <array>
#include <unordered_map>

#include "base/text.h"

namespace trireme {
namespace {

struct Unit {
  std::string_view canonical;
  std::string_view dimension{};  // empty: no conversion
  int64_t factor = 0;
};

const std::unordered_map<std::string_view, Unit>& units() {
  static const std::unordered_map<std::string_view, Unit> table = [] {
    std::unordered_map<std::string_view, Unit> t;
    const auto put = [&](std::initializer_list<std::string_view> names, Unit unit) {
      for (const std::string_view name : names) t[name] = unit;
    };
    put({"mm", "millimeter", "millimetre"}, {"mm", "length", 1});
    put({"cm", "centimeter", "centimetre"}, {"cm", "length", 10});
    put({"dm", "decimeter", "decimetre"}, {"dm", "length", 100});
    put({"m", "meter", "metre"}, {"m", "length", 1000});
    put({"km", "kilometer", "kilometre"}, {"km", "length", 1000000});
    put({"in", "inch", "inche"}, {"in", "imperial length", 1});
    put({"ft", "foot", "feet"}, {"ft", "imperial length", 12});
    put({"yd", "yard"}, {"yd", "imperial length", 36});
    put({"mi", "mile"}, {"mi", "imperial length", 63360});
    put({"mg", "milligram"}, {"mg", "mass", 1});
    put({"g", "gram", "gm"}, {"g", "mass", 1000});
    put({"kg", "kilogram", "kilo"}, {"kg", "mass", 1000000});
    put({"oz", "ounce"}, {"oz", "imperial mass", 1});
    put({"lb", "lbs", "pound"}, {"lb", "imperial mass", 16});
    put({"ms", "millisecond"}, {"ms", "time", 1});
    put({"s", "sec", "second"}, {"s", "time", 1000});
    put({"min", "minute"}, {"min", "time", 60000});
    put({"h", "hr", "hour"}, {"h", "time", 3600000});
    put({"day"}, {"day", "time", 86400000});
    put({"week"}, {"week", "time", 604800000});
    put({"month"}, {"month", "calendar", 1});
    put({"year", "yr"}, {"year", "calendar", 12});
    put({"ml", "milliliter", "millilitre"}, {"ml", "volume", 1});
    put({"l", "liter", "litre"}, {"l", "volume", 1000});
    put({"cent"}, {"cent", "money", 1});
    put({"dollar", "usd", "buck"}, {"dollar", "money", 100});
    put({"mph"}, {"mi/h"});
    put({"kph", "kmh", "kmph"}, {"km/h"});
    put({"euro", "eur"}, {"euro"});
    put({"gbp"}, {"gbp"});
    put({"yen"}, {"yen"});
    put({"rupee"}, {"rupee"});
    put({"degree", "deg"}, {"degree"});
    put({"radian", "rad"}, {"radian"});
    put({"celsius"}, {"celsius"});
    put({"fahrenheit"}, {"fahrenheit"});
    put({"gallon", "gal"}, {"gallon"});
    put({"acre"}, {"acre"});
    put({"newton"}, {"newton"});
    put({"joule"}, {"joule"});
    put({"watt"}, {"watt"});
    put({"volt"}, {"volt"});
    put({"kwh"}, {"kwh"});
    put({"am", "a.m"}, {"am"});
    put({"pm", "p.m"}, {"pm"});
    return t;
  }();
  return table;
}

const Unit* find_unit(std::string_view word) {
  const auto& table = units();
  auto found = table.find(word);
  if (found == table.end() && word.size() > 2 && word.back() == 's')
    found = table.find(word.substr(0, word.size() - 1));
  return found == table.end() ? nullptr : &found->second;
}

constexpr std::array<std::string_view, 20> kSmall = {
    "zero", "one",    "two",    "three",    "four",     "five",    "six",     "seven",     "eight",    "nine",
    "ten",  "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
constexpr std::array<std::string_view, 8> kTens = {"twenty", "thirty",  "forty",  "fifty",
                                                   "sixty",  "seventy", "eighty", "ninety"};

std::optional<int64_t> index_of(std::string_view word, const std::string_view* begin, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (begin[i] == word) return static_cast<int64_t>(i);
  }
  return std::nullopt;
}

}  // namespace

bool known_unit(std::string_view word) { return word.size() > 1 && find_unit(word) != nullptr; }

std::string canonical_unit(std::string_view word) {
  const Unit* unit = find_unit(word);
  return unit == nullptr ? std::string() : std::string(unit->canonical);
}

std::optional<int64_t> scale_word(std::string_view word) {
  if (word == "dozen") return 12;
  if (word == "hundred") return 100;
  if (word == "thousand") return 1000;
  if (word == "million") return 1000000;
  if (word == "billion") return 1000000000;
  if (word == "trillion") return 1000000000000;
  return std::nullopt;
}

std::optional<std::pair<int64_t, int64_t>> unit_factors(std::string_view a, std::string_view b) {
  const Unit* first = find_unit(a);
  const Unit* second = find_unit(b);
  if (first == nullptr || second == nullptr || first->dimension.empty() || first->dimension != second->dimension)
    return std::nullopt;
  return std::pair(first->factor, second->factor);
}

std::optional<int64_t> number_word(std::string_view words) {
  if (const auto small = index_of(words, kSmall.data(), kSmall.size())) return small;
  const size_t gap = words.find_first_of("- ");
  const auto tens = index_of(words.substr(0, gap), kTens.data(), kTens.size());
  if (!tens) return std::nullopt;
  const int64_t value = 20 + 10 * *tens;
  if (gap == std::string_view::npos) return value;
  const auto small = index_of(words.substr(gap + 1), kSmall.data(), 10);
  if (!small || *small == 0) return std::nullopt;
  return value + *small;
}

}  // namespace trireme
