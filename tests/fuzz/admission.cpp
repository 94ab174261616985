// AdmissionReview bodies: any bytes give an answer, and what defaulting writes is still read by validation.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "operator/webhook/admission.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string body(reinterpret_cast<const char*>(data), size);
  const auto validated = trireme::webhook::review_validating(body);
  const auto defaulted = trireme::webhook::review_defaulting(body, {"registry/trainer:1"});
  if (validated.http_status != defaulted.http_status) std::abort();
  if (validated.http_status == 200 && !trireme::Json::accept(validated.body)) std::abort();
  if (defaulted.http_status == 200 && !defaulted.allowed) std::abort();
  return 0;
}
