// A few of many cases that together show what any pair of traits does.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace trireme::test {

// TRIREME_WHOLE_MATRIX=1: every case, for those that have changed what the cases are of.
inline bool whole_matrix() { return std::getenv("TRIREME_WHOLE_MATRIX") != nullptr; }

// TRIREME_WHOLE_MATRIX=2/6: of all cases every sixth, from the second on, so that six processes run all of them.
inline bool in_part(size_t index) {
  int part = 1, parts = 1;
  const char* text = std::getenv("TRIREME_WHOLE_MATRIX");
  if (text == nullptr || std::sscanf(text, "%d/%d", &part, &parts) != 2) return true;
  return static_cast<int>(index % static_cast<size_t>(parts)) == part - 1;
}

// Every pair of the traits, by names that do not depend on their order.
inline std::set<std::string> pairs_of(const std::set<std::string>& traits) {
  std::set<std::string> pairs;
  for (auto one = traits.begin(); one != traits.end(); ++one) {
    for (auto other = std::next(one); other != traits.end(); ++other) pairs.insert(*one + " with " + *other);
  }
  return pairs;
}

// Cases in their order, of which each shows `shows(case)`: few that show all that any of `cases` shows.
template <typename Case>
std::vector<Case> covering(const std::vector<Case>& cases,
                           const std::function<std::set<std::string>(const Case&)>& shows) {
  std::set<size_t> chosen;
  std::set<std::string> shown;
  for (;;) {
    size_t best = 0, most = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      size_t added = 0;
      for (const std::string& what : shows(cases[i])) added += shown.count(what) == 0 ? 1 : 0;
      if (added > most) best = i, most = added;
    }
    if (most == 0) break;
    chosen.insert(best);
    shown.merge(shows(cases[best]));
  }
  std::vector<Case> result;
  for (const size_t i : chosen) result.push_back(cases[i]);
  return result;
}

}  // namespace trireme::test
