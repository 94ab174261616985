// Bytes from a peer: whatever they are, what is let in is within its limits and does not depend on what follows it, and
// what is refused stays refused.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "operator/kube/request_scan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using trireme::kube::RequestScan;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  trireme::kube::RequestLimits limits;
  limits.max_head_bytes = 300;
  limits.max_headers = 8;
  limits.max_body_bytes = 100;
  const RequestScan scan = trireme::kube::scan_request(bytes, limits);
  const RequestScan more = trireme::kube::scan_request(bytes + "GET / HTTP/1.1\r\n\r\n", limits);
  if (scan.state == RequestScan::State::kWhole) {
    if (scan.size > size || scan.size > limits.max_head_bytes + limits.max_body_bytes) std::abort();
    if (more.state != scan.state || more.size != scan.size) std::abort();
  } else if (scan.state == RequestScan::State::kRefused) {
    if (scan.status < 400 || more.state != scan.state || more.status != scan.status) std::abort();
  } else if (size >= limits.max_head_bytes + limits.max_body_bytes) {
    std::abort();
  }
  return 0;
}
