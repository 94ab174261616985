// Admission: AdmissionReview v1 in, AdmissionReview v1 out. Pure and total: no input makes these functions throw.
#pragma once

#include <string>

#include "api/rljob.h"

namespace trireme::webhook {

struct AdmissionAnswer {
  int http_status = 200;  // 400: the request was no AdmissionReview
  std::string body;       // JSON, or one sentence with 400
  bool allowed = false;
};

struct DefaultingOptions {
  std::string image;  // of jobs that name none, or the API's default one; empty: that one
};

// Refuses what api/validate.h calls wrong. A change that leaves the specification alone, and everything about an object
// that is being deleted, is allowed: a finalizer must always come off.
AdmissionAnswer review_validating(const std::string& body);

// Writes the defaults into the object as a JSON patch of additions; never changes what the user wrote (but for the
// schema's default image, which cannot be told from one). Refuses what review_validating would: mutating webhooks are
// asked before the schema's own rules, so this is the sentence that a user sees, with the legal values, and not the
// rule's. What cannot be read is allowed unchanged: the schema says what is wrong with it.
AdmissionAnswer review_defaulting(const std::string& body, const DefaultingOptions& options);

// JSON patch of "add" operations that put into `given` what only `full` has. Goes into objects, not into lists.
Json additions(const Json& given, const Json& full, const std::string& path);

}  // namespace trireme::webhook
