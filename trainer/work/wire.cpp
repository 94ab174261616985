#include "trainer/work/wire.h"

#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 32;
constexpr size_t kMaxWord = 256;  // a name, a session, a link
constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 4;
constexpr size_t kMaxCounters = 64;

Json parse_object(std::string_view body, size_t limit, const char* what) {
  if (body.size() > limit) fail_data(std::string(what) + " is larger than " + format_bytes(limit));
  if (json_depth(body) > kMaxDepth) fail_data(std::string(what) + " is nested too deep");
  Json json = Json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) fail_data(std::string(what) + " is no JSON object");
  return json;
}

const Json& member(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end()) fail_data(std::string("'") + key + "' is missing");
  return *found;
}

int64_t number(const Json& json, const char* key, int64_t least, int64_t most) {
  const Json& value = member(json, key);
  const bool fits =
      value.is_number_unsigned() ? value.get<uint64_t>() <= static_cast<uint64_t>(kMost) : value.is_number_integer();
  const int64_t n = fits ? value.get<int64_t>() : 0;
  if (!fits || n < least || n > most) fail_data(std::string("'") + key + "' is no number in its range");
  return n;
}

double seconds(const Json& json, const char* key) {
  const Json& value = member(json, key);
  const double s = value.is_number() ? value.get<double>() : -1;
  if (!std::isfinite(s) || s < 0) fail_data(std::string("'") + key + "' is no time in seconds");
  return s;
}

std::string text(const Json& json, const char* key, size_t limit) {
  const Json& value = member(json, key);
  if (!value.is_string() || value.get_ref<const std::string&>().size() > limit)
    fail_data(std::string("'") + key + "' is no text of at most " + std::to_string(limit) + " bytes");
  return value.get<std::string>();
}

bool flag(const Json& json, const char* key) {
  const Json& value = member(json, key);
  if (!value.is_boolean()) fail_data(std::string("'") + key + "' is neither true nor false");
  return value.get<bool>();
}

template <typename T>
std::vector<T> numbers(const Json& json, const char* key, size_t limit, int64_t least) {
  const Json& value = member(json, key);
  if (!value.is_array() || value.size() > limit)
    fail_data(std::string("'") + key + "' is no list of at most " + std::to_string(limit));
  std::vector<T> result;
  result.reserve(value.size());
  for (const Json& one : value) {
    if (!one.is_number_integer() || (one.is_number_unsigned() && one.get<uint64_t>() > uint64_t{1} << 62))
      fail_data(std::string("'") + key + "' has something else than whole numbers");
    const auto n = one.get<int64_t>();
    if (n < least || n > static_cast<int64_t>(std::numeric_limits<T>::max()))
      fail_data(std::string("'") + key + "' has a number out of its range");
    result.push_back(static_cast<T>(n));
  }
  return result;
}

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

void put(Json& json, const Caller& caller) {
  json["engine"] = caller.engine;
  json["session"] = caller.session;
  json["desk"] = caller.desk;
}

Caller caller_of(const Json& json) {
  return {number(json, "engine", 0, kMaxWireRuns), text(json, "session", kMaxWord), text(json, "desk", kMaxWord)};
}

Json to_json(const RewardCounters& one) {
  return {{"name", one.name},       {"scored", one.scored},       {"failed", one.failed},
          {"dropped", one.dropped}, {"busy_s", one.busy_seconds}, {"last_error", one.last_error}};
}

RewardCounters counters_of(const Json& json) {
  if (!json.is_object()) fail_data("'counters' has something else than a reward's");
  return {text(json, "name", kMaxWord),      number(json, "scored", 0, kMost), number(json, "failed", 0, kMost),
          number(json, "dropped", 0, kMost), seconds(json, "busy_s"),          text(json, "last_error", kMaxWireText)};
}

Json to_json(const LeasedWork& work) {
  return {{"run", work.run},
          {"group", work.group},
          {"first_sample", work.first_sample},
          {"count", work.count},
          {"first_sample_id", work.first_sample_id},
          {"prompt", work.prompt},
          {"prompt_text", work.prompt_text},
          {"gold", work.gold},
          {"extra", work.extra},
          {"forced_lengths", work.forced_lengths}};
}

LeasedWork work_of(const Json& json) {
  if (!json.is_object()) fail_data("'runs' has something else than a run");
  LeasedWork work;
  work.run = number(json, "run", 0, kMost);
  work.group = number(json, "group", 0, kMost);
  work.first_sample = number(json, "first_sample", 0, kMost);
  work.count = number(json, "count", 1, kMaxWireRuns);
  work.first_sample_id = static_cast<uint64_t>(number(json, "first_sample_id", 0, kMost));
  work.prompt = numbers<int32_t>(json, "prompt", kMaxWireText, 0);
  work.prompt_text = text(json, "prompt_text", kMaxWireText);
  work.gold = text(json, "gold", kMaxWireText);
  work.extra = member(json, "extra");
  work.forced_lengths = numbers<int64_t>(json, "forced_lengths", static_cast<size_t>(kMaxWireRuns), 1);
  if (!work.forced_lengths.empty() && static_cast<int64_t>(work.forced_lengths.size()) != work.count)
    fail_data("'forced_lengths' are not those of the run's samples");
  return work;
}

}  // namespace

std::string to_body(const RewardRequest& probe) {
  return dump({{"prompt", probe.prompt},
               {"response", probe.response},
               {"gold", probe.gold},
               {"extra", probe.extra},
               {"truncated", probe.truncated}});
}

RewardRequest parse_probe(std::string_view body) {
  const Json json = parse_object(body, 4 * kMaxWireText, "what rewards are probed with");
  return {text(json, "prompt", kMaxWireText), text(json, "response", kMaxWireText), text(json, "gold", kMaxWireText),
          member(json, "extra"), flag(json, "truncated")};
}

std::string to_body(const JoinRequest& request) {
  return dump({{"name", request.name},
               {"session", request.session},
               {"config", request.config},
               {"model", request.model},
               {"tokenizer", request.tokenizer},
               {"places", request.places},
               {"program", request.program}});
}

JoinRequest parse_join_request(std::string_view body) {
  const Json json = parse_object(body, 2 * kMaxWireText, "the request to join");
  JoinRequest request;
  request.name = text(json, "name", kMaxWord);
  request.session = text(json, "session", kMaxWord);
  request.config = text(json, "config", kMaxWireText);
  request.model = text(json, "model", kMaxWireText);
  request.tokenizer = text(json, "tokenizer", kMaxWireText);
  request.places = number(json, "places", 1, kMaxWireRuns);
  request.program = text(json, "program", kMaxWord);
  if (request.name.empty() || request.session.empty()) fail_data("'name' and 'session' must not be empty");
  return request;
}

std::string to_body(const JoinReply& reply) {
  return dump({{"engine", reply.engine},
               {"desk", reply.desk},
               {"group_size", reply.group_size},
               {"in_flight", reply.in_flight},
               {"silence_ms", reply.silence_ms}});
}

JoinReply parse_join_reply(std::string_view body) {
  const Json json = parse_object(body, kMaxWireHead, "the answer to a join");
  return {number(json, "engine", 0, kMaxWireRuns), text(json, "desk", kMaxWord),
          number(json, "group_size", 1, kMaxWireRuns), flag(json, "in_flight"), number(json, "silence_ms", 1, kMost)};
}

std::string to_body(const LeaseRequest& request) {
  Json json = {{"places", request.places},        {"version", request.version},
               {"fetched", request.fetched},      {"steps", request.steps},
               {"wait_ms", request.wait_ms},      {"transfer_s", request.transfer_s},
               {"stall_s", request.stall_s},      {"recomputed_rows", request.recomputed_rows},
               {"may_change", request.may_change}};
  put(json, request.caller);
  return dump(json);
}

LeaseRequest parse_lease_request(std::string_view body) {
  const Json json = parse_object(body, kMaxWireHead, "the request for a lease");
  LeaseRequest request;
  request.caller = caller_of(json);
  request.places = number(json, "places", 0, kMaxWireRuns);
  request.version = number(json, "version", -1, kMost);
  request.fetched = number(json, "fetched", -1, kMost);
  request.steps = number(json, "steps", 0, kMost);
  request.wait_ms = number(json, "wait_ms", 0, kMaxWireWait_ms);
  request.transfer_s = seconds(json, "transfer_s");
  request.stall_s = seconds(json, "stall_s");
  request.recomputed_rows = number(json, "recomputed_rows", 0, kMost);
  request.may_change = flag(json, "may_change");
  if (request.fetched < request.version) fail_data("'fetched' is older than 'version'");
  return request;
}

std::string to_body(const LeaseReply& reply) {
  Json runs = Json::array();
  for (const LeasedWork& work : reply.runs) runs.push_back(to_json(work));
  return dump({{"runs", std::move(runs)}, {"left", reply.left}, {"known", reply.known}, {"over", reply.over}});
}

LeaseReply parse_lease_reply(std::string_view body) {
  const Json json = parse_object(body, kMaxLeaseReply, "the answer to a lease");
  LeaseReply reply;
  const Json& runs = member(json, "runs");
  if (!runs.is_array() || static_cast<int64_t>(runs.size()) > kMaxWireRuns) fail_data("'runs' is no list of runs");
  for (const Json& run : runs) reply.runs.push_back(work_of(run));
  reply.left = flag(json, "left");
  reply.known = flag(json, "known");
  reply.over = flag(json, "over");
  return reply;
}

std::string to_body(const GroupsRequest& request) {
  Json json = {{"run", request.run},
               {"group", request.group},
               {"first_sample", request.first_sample},
               {"counters", Json::array()}};
  for (const RewardCounters& one : request.counters) json["counters"].push_back(to_json(one));
  put(json, request.caller);
  return dump(json) + "\n" + pack_samples(request.samples);
}

GroupsRequest parse_groups_request(std::string_view body) {
  const size_t line = body.substr(0, kMaxWireHead).find('\n');
  if (line == std::string_view::npos) fail_data("samples have no line of JSON ahead of them");
  const Json json = parse_object(body.substr(0, line), kMaxWireHead, "the line ahead of samples");
  GroupsRequest request;
  request.caller = caller_of(json);
  request.run = number(json, "run", 0, kMost);
  request.group = number(json, "group", 0, kMost);
  request.first_sample = number(json, "first_sample", 0, kMost);
  const Json& counters = member(json, "counters");
  if (!counters.is_array() || counters.size() > kMaxCounters) fail_data("'counters' is no list of rewards");
  for (const Json& one : counters) request.counters.push_back(counters_of(one));
  static const std::vector<SharedTokens> kNoPrompt(1);
  request.samples = unpack_samples(body.substr(line + 1), kNoPrompt);
  if (request.samples.empty() || static_cast<int64_t>(request.samples.size()) > kMaxWireRuns)
    fail_data("a run has no samples, or too many");
  return request;
}

std::string to_body(const GroupsReply& reply) {
  return dump({{"result", reply.result == GroupsReply::Result::kTooOld ? "too_old" : "counted"}});
}

GroupsReply parse_groups_reply(std::string_view body) {
  const Json json = parse_object(body, kMaxWireHead, "the answer to samples");
  const std::string result = text(json, "result", kMaxWord);
  if (result != "counted" && result != "too_old") fail_data("'result' is neither counted nor too_old");
  return {result == "too_old" ? GroupsReply::Result::kTooOld : GroupsReply::Result::kCounted};
}

std::string to_body(const WeightsReply& reply) {
  return dump({{"version", reply.version},
               {"engine", reply.engine},
               {"link", reply.link},
               {"known", reply.known},
               {"over", reply.over}});
}

WeightsReply parse_weights_reply(std::string_view body) {
  const Json json = parse_object(body, kMaxWireHead, "the answer about weights");
  return {number(json, "version", -1, kMost), number(json, "engine", 0, kMost), text(json, "link", kMaxWord),
          flag(json, "known"), flag(json, "over")};
}

std::string to_body(const LeaveRequest& request) {
  Json json = {{"why", request.why}, {"fatal", request.fatal}, {"kind", request.kind}};
  put(json, request.caller);
  return dump(json);
}

LeaveRequest parse_leave_request(std::string_view body) {
  const Json json = parse_object(body, kMaxWireHead, "the request to leave");
  return {caller_of(json), text(json, "why", kMaxWireHead), flag(json, "fatal"),
          number(json, "kind", 0, static_cast<int64_t>(ErrorKind::kInternal))};
}

std::string to_query(const WeightsRequest& request) {
  return "engine=" + std::to_string(request.caller.engine) + "&session=" + request.caller.session +
         "&desk=" + request.caller.desk + "&after=" + std::to_string(request.after) +
         "&wait_ms=" + std::to_string(request.wait_ms);
}

WeightsRequest parse_weights_query(std::string_view query) {
  if (query.size() > 4 * kMaxWord) fail_data("a question about weights is too long");
  Json json = Json::object();
  for (const std::string& part : split(query, '&')) {
    const size_t sign = part.find('=');
    if (sign == std::string::npos) fail_data("a question about weights has a part without '='");
    const std::string key = part.substr(0, sign), value = part.substr(sign + 1);
    if (key == "session" || key == "desk") {
      json[key] = value;
      continue;
    }
    const std::optional<int64_t> n = parse_int(value);
    if (!n) fail_data("'" + key + "' of a question about weights is no number");
    json[key] = *n;
  }
  WeightsRequest request;
  request.caller = caller_of(json);
  request.after = number(json, "after", -1, kMost);
  request.wait_ms = number(json, "wait_ms", -1, kMaxWireWait_ms);
  return request;
}

}  // namespace trireme
