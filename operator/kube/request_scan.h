// Looks at the bytes that a peer has sent so far: is a whole HTTP/1.1 request among them, and may it come in? Pure;
// what is let through is parsed by the HTTP library afterwards.
#pragma once

#include <cstddef>
#include <string_view>

namespace trireme::kube {

struct RequestLimits {
  size_t max_head_bytes = 16u << 10;  // request line and headers
  size_t max_headers = 64;
  size_t max_body_bytes = 3u << 20;
};

struct RequestScan {
  enum class State {
    kMore,     // what is there may become a request
    kWhole,    // the first `size` bytes are one
    kRefused,  // answer `status`, then close
  };
  State state = State::kMore;
  size_t size = 0;
  int status = 0;
  const char* why = "";
  // Where the peer waits for "100 Continue" before it sends the body: the place of its Expect header, else 0.
  size_t expect_at = 0;
};

// A body needs a Content-Length within the limit: one in chunks (411) or compressed (415) could be of any size. Also
// refused: heads over the limits (431), what two readers could read differently (400): no or several different lengths,
// a length and chunks, folded headers, bytes that are no header.
RequestScan scan_request(std::string_view bytes, const RequestLimits& limits);

}  // namespace trireme::kube
