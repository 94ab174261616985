// Which weights drew which tokens of a response.
//
// The weights' version: 0 are those that a run begins with, every step that trains the policy adds one. A response that
// was not finished when the weights changed goes on with the new ones, so one number a response is not enough.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace trireme {

// Tokens [from, to) of a response.
struct VersionSpan {
  int64_t version = 0;
  int64_t from = 0;
  int64_t to = 0;
  bool operator==(const VersionSpan&) const = default;
};

// Of one response, in the order of its tokens, each of which is in one. Versions rise. None: nobody said, which counts
// as the present weights.
using VersionSpans = std::vector<VersionSpan>;

// The token behind the last one was drawn from weights of `version`.
inline void append_version(VersionSpans& spans, int64_t version) {
  if (!spans.empty() && spans.back().version == version) {
    ++spans.back().to;
    return;
  }
  const int64_t from = spans.empty() ? 0 : spans.back().to;
  spans.push_back({version, from, from + 1});
}

// Whether they are those of a response of `tokens` tokens: without a gap, none empty, versions rising from 0 or more.
inline bool spans_tile(const VersionSpans& spans, int64_t tokens) {
  int64_t end = 0, last = -1;
  for (const VersionSpan& span : spans) {
    if (span.from != end || span.to <= span.from || span.version <= last) return false;
    end = span.to;
    last = span.version;
  }
  return end == tokens;
}

// Whether all tokens were drawn from weights of `version`.
inline bool all_of_version(const VersionSpans& spans, int64_t version) {
  return std::all_of(spans.begin(), spans.end(), [&](const VersionSpan& span) { return span.version == version; });
}

}  // namespace trireme
