#include "operator/webhook/admission.h"

#include <optional>
#include <utility>

#include "api/validate.h"
#include "base/error.h"
#include "base/text.h"
#include "operator/kube/client_config.h"
#include "operator/kube/json_scan.h"

namespace trireme::webhook {
namespace {

constexpr const char* kReviewVersion = "admission.k8s.io/v1";
constexpr size_t kShownIssues = 20;
constexpr size_t kMaxWarnings = 8;
constexpr size_t kMaxWarningBytes = 240;
// Answers stay short enough for the server to hold them while their peers read.
constexpr size_t kMaxMessageBytes = 32u << 10;
constexpr size_t kMaxUidBytes = 256;

struct Request {
  Json uid;
  std::string operation;
  Json object;
  Json old_object;
  bool is_rljob = false;
  bool subresource = false;

  bool concerns_us() const { return (operation == "CREATE" || operation == "UPDATE") && is_rljob && !subresource; }
  // A finalizer must always come off, a label always go on.
  bool changes_nothing() const;
};

AdmissionAnswer bad_request(const std::string& message) { return {400, message, false}; }

AdmissionAnswer respond(Json response, bool allowed) {
  response["allowed"] = allowed;
  const Json review = {{"apiVersion", kReviewVersion}, {"kind", "AdmissionReview"}, {"response", std::move(response)}};
  return {200, review.dump(-1, ' ', false, Json::error_handler_t::replace), allowed};
}

std::string text(const Json& object, const char* key) {
  if (!object.is_object()) return {};
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

const Json& member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

// Leaves null.
Json take(Json& object, const char* key) {
  if (!object.is_object()) return {};
  const auto found = object.find(key);
  return found == object.end() ? Json() : std::exchange(*found, Json());
}

// What is looked at; only this is parsed. A review holds the object and, on UPDATE, the old one. Both come with managed
// fields (a value per field and manager), the status, and kubectl's copy in an annotation; nothing bounds the number of
// values in these. What is left are two specifications and little more, which fit into kMaxValues.
const kube::JsonFields& review_fields() {
  static const kube::JsonFields kFields = [] {
    kube::JsonFields fields({"apiVersion", "kind", "request.uid", "request.operation", "request.subResource",
                             "request.kind.group", "request.kind.kind"});
    for (const std::string object : {"request.object.", "request.oldObject."}) {
      for (const char* field :
           {"apiVersion", "kind", "metadata.name", "metadata.namespace", "metadata.deletionTimestamp", "spec"})
        fields.add(object + field);
    }
    return fields;
  }();
  return kFields;
}

bool Request::changes_nothing() const {
  if (operation != "UPDATE") return false;
  const bool deleting = !text(member(object, "metadata"), "deletionTimestamp").empty();
  return deleting || member(object, "spec") == member(old_object, "spec");
}

// Throws Error(kUser) or, where the text is cut or no JSON, Error(kData).
Request read_request(const std::string& body) {
  Json review = parse_json_bounded(review_fields().select(body), "AdmissionReview");
  if (text(review, "kind") != "AdmissionReview" || text(review, "apiVersion") != kReviewVersion) {
    fail_user(std::string("the body is no AdmissionReview of ") + kReviewVersion);
  }
  Json request = take(review, "request");
  const std::string uid = text(request, "uid");
  if (uid.empty()) fail_user("request or request.uid is missing");
  if (uid.size() > kMaxUidBytes) fail_user("request.uid is longer than " + std::to_string(kMaxUidBytes) + " bytes");
  Request out;
  out.uid = uid;
  out.operation = text(request, "operation");
  out.object = take(request, "object");
  out.old_object = take(request, "oldObject");
  out.subresource = !text(request, "subResource").empty();
  const Json& kind = member(request, "kind");
  out.is_rljob = text(kind, "group") == kApiGroup && text(kind, "kind") == kRLJobKind;
  return out;
}

Json warnings_json(const std::vector<Issue>& warnings) {
  Json list = Json::array();
  for (const Issue& warning : warnings) {
    if (list.size() == kMaxWarnings) break;
    std::string line = warning.path + ": " + warning.message;
    if (line.size() > kMaxWarningBytes) line.resize(kMaxWarningBytes);
    list.push_back(std::move(line));
  }
  return list;
}

struct Findings {
  std::vector<Issue> unreadable;  // what the schema refuses, too
  std::vector<Issue> wrong;
  std::vector<Issue> warnings;

  const std::vector<Issue>& errors() const { return unreadable.empty() ? wrong : unreadable; }
};

Findings findings_of(const Request& request, const Json& object) {
  Findings found;
  try {
    const RLJob job = rljob_from_json(object, found.unreadable, {.strict = false});
    if (!found.unreadable.empty()) return found;
    Validation result = validate(job);
    found.wrong = std::move(result.errors);
    found.warnings = std::move(result.warnings);
    if (found.wrong.empty() && request.operation == "UPDATE") {
      std::vector<Issue> ignored;  // an old object that cannot be read forbids nothing
      const RLJob old_job = rljob_from_json(request.old_object, ignored, {.strict = false});
      if (ignored.empty()) found.wrong = validate_update(old_job, job).errors;
    }
  } catch (const std::exception& e) {
    found.unreadable.push_back({"spec", e.what()});
  }
  return found;
}

AdmissionAnswer refuse(Json response, const std::vector<Issue>& errors) {
  std::string message = to_string(errors, {}, kShownIssues);
  if (message.size() > kMaxMessageBytes) message.resize(kMaxMessageBytes);
  while (!is_valid_utf8(message)) message.pop_back();  // a character was cut
  response["status"] = {{"code", 422}, {"reason", "Invalid"}, {"message", std::move(message)}};
  return respond(std::move(response), false);
}

}  // namespace

AdmissionAnswer review_validating(const std::string& body) {
  Request request;
  try {
    request = read_request(body);
  } catch (const std::exception& e) {
    return bad_request(e.what());
  }
  Json response = {{"uid", request.uid}};
  if (!request.concerns_us() || request.changes_nothing()) return respond(std::move(response), true);
  const Findings found = findings_of(request, request.object);
  if (!found.warnings.empty()) response["warnings"] = warnings_json(found.warnings);
  return found.errors().empty() ? respond(std::move(response), true) : refuse(std::move(response), found.errors());
}

Json additions(const Json& given, const Json& full, const std::string& path) {
  Json patch = Json::array();
  if (!given.is_object() || !full.is_object()) return patch;
  for (const auto& [key, value] : full.items()) {
    const std::string at = path + "/" + replace_all(replace_all(key, "~", "~0"), "/", "~1");
    const auto found = given.find(key);
    if (found == given.end() || found->is_null()) {
      patch.push_back({{"op", "add"}, {"path", at}, {"value", value}});
    } else {
      for (Json& operation : additions(*found, value, at)) patch.push_back(std::move(operation));
    }
  }
  return patch;
}

namespace {

// Empty when the object cannot be read.
std::optional<Json> defaults_of(const Request& request, const DefaultingOptions& options) {
  std::vector<Issue> issues;
  RLJob job = rljob_from_json(request.object, issues, {.strict = false});
  if (!issues.empty()) return std::nullopt;
  const Json& spec = member(request.object, "spec");
  Json replacement;
  // The API server has filled in the schema's default before it asks us.
  const std::string image = text(spec, "image");
  // What was made before this setting stays as it is; what we wrote once is written again.
  const bool ours = request.operation == "CREATE" || text(member(request.old_object, "spec"), "image") == options.image;
  if (!options.image.empty() && options.image != kDefaultImage && image == kDefaultImage && ours)
    replacement = {{"op", "replace"}, {"path", "/spec/image"}, {"value", options.image}};
  if (!options.image.empty() && image.empty()) job.spec.image = options.image;
  Json patch = additions(spec, spec_to_json(job.spec), "/spec");
  if (!replacement.is_null()) patch.push_back(std::move(replacement));
  return patch;
}

}  // namespace

AdmissionAnswer review_defaulting(const std::string& body, const DefaultingOptions& options) {
  Request request;
  try {
    request = read_request(body);
  } catch (const std::exception& e) {
    return bad_request(e.what());
  }
  Json response = {{"uid", request.uid}};
  if (!request.concerns_us() || !member(request.object, "spec").is_object()) return respond(std::move(response), true);
  Json patch = Json::array();
  try {
    if (std::optional<Json> defaults = defaults_of(request, options)) {
      patch = std::move(*defaults);
      if (!request.changes_nothing()) {
        request.object.patch_inplace(patch);
        const Findings found = findings_of(request, request.object);
        if (!found.wrong.empty()) return refuse(std::move(response), found.wrong);
      }
    }
  } catch (const std::exception&) {
    patch = Json::array();
  }
  if (!patch.empty()) {
    response["patchType"] = "JSONPatch";
    response["patch"] = kube::base64_encode(patch.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  return respond(std::move(response), true);
}

}  // namespace trireme::webhook
