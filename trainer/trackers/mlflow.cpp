#include "trainer/trackers/mlflow.h"

#include <httplib.h>

#include <chrono>
#include <cmath>

#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/url.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// Limits of one request of runs/log-batch, and of one parameter's value.
constexpr size_t kMostMetrics = 1000, kMostParams = 100, kLongestParam = 500;

int64_t ms(double seconds) { return static_cast<int64_t>(seconds * 1000); }

// {"a": {"b": 1}} -> "a.b": "1".
void flatten(const nlohmann::json& value, const std::string& path, std::map<std::string, std::string>& flat) {
  if (value.is_object() && !value.empty()) {
    for (const auto& [key, inner] : value.items()) flatten(inner, path.empty() ? key : path + "." + key, flat);
  } else {
    flat[path] = (value.is_string() ? value.get<std::string>() : value.dump()).substr(0, kLongestParam);
  }
}

class Mlflow final : public Tracker {
 public:
  explicit Mlflow(MlflowOptions options) : options_(std::move(options)) {
    const std::string& uri = options_.tracking_uri;
    const Url url = split_url(uri);
    origin_ = url.origin();
    prefix_ = url.path;
    while (!prefix_.empty() && prefix_.back() == '/') prefix_.pop_back();
    if (url.names_user()) {
      fail_user(
          "logger.mlflow.tracking_uri holds a user name: give MLFLOW_TRACKING_USERNAME and "
          "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment instead");
    }
    if (!url.is_http()) {
      fail_user("logger.mlflow.tracking_uri: '" + uri +
                "' is not http(s)://host[:port]; give a tracking server's address there or in MLFLOW_TRACKING_URI "
                "(folders and data bases are not written)");
    }
  }
  const char* name() const override { return "MLflow"; }

  void begin(const TrackedRun& run) override {
    if (run.resumed_step > 0 && run_id_.empty()) find_old_run();
    if (run_id_.empty()) create_run();
    if (run.resumed_step > 0 || params_sent_) return;
    std::map<std::string, std::string> flat;
    flatten(run.config, "", flat);
    nlohmann::json params = nlohmann::json::array();
    for (const auto& [key, value] : flat) {
      params.push_back({{"key", key}, {"value", value}});
      if (params.size() == kMostParams) log_batch("params", params);
    }
    log_batch("params", params);
    params_sent_ = true;
  }

  void log(const TrackedStep& step) override {
    nlohmann::json metrics = nlohmann::json::array();
    for (const auto& [name, value] : step.values) {
      if (!std::isfinite(value)) continue;
      metrics.push_back({{"key", name}, {"value", value}, {"timestamp", ms(step.wall_time_s)}, {"step", step.step}});
      if (metrics.size() == kMostMetrics) log_batch("metrics", metrics);
    }
    log_batch("metrics", metrics);
  }

  void end(bool succeeded) override {
    call("POST", "runs/update",
         {{"run_id", run_id_}, {"status", succeeded ? "FINISHED" : "FAILED"}, {"end_time", ms(unix_now_s())}});
  }

 private:
  void find_old_run() {
    if (!fs::exists(options_.state_file)) return;
    const auto state = nlohmann::json::parse(read_file(options_.state_file), nullptr, false);
    if (!state.is_object() || state.value("tracking_uri", "") != options_.tracking_uri) return;
    const std::string id = state.value("run_id", "");
    if (id.empty()) return;
    // Somebody may have deleted it there: then the run goes on as another.
    if (!call("POST", "runs/update", {{"run_id", id}, {"status", "RUNNING"}}, true).is_null()) run_id_ = id;
  }

  void create_run() {
    std::string experiment;
    const auto found = call(
        "GET", "experiments/get-by-name?experiment_name=" + httplib::encode_query_component(options_.experiment_name),
        {}, true);
    if (found.is_object()) {
      experiment = found.at("experiment").at("experiment_id").get<std::string>();
    } else {
      experiment = call("POST", "experiments/create", {{"name", options_.experiment_name}})
                       .at("experiment_id")
                       .get<std::string>();
    }
    nlohmann::json body = {{"experiment_id", experiment}, {"start_time", ms(unix_now_s())}};
    if (!options_.run_name.empty()) body["run_name"] = options_.run_name;
    run_id_ = call("POST", "runs/create", body).at("run").at("info").at("run_id").get<std::string>();
    write_file_atomic(options_.state_file,
                      nlohmann::json{{"tracking_uri", options_.tracking_uri}, {"run_id", run_id_}}.dump() + "\n");
  }

  // Sends what `entries` holds and empties it. The server takes the same entries again without harm.
  void log_batch(const char* kind, nlohmann::json& entries) {
    if (entries.empty()) return;
    call("POST", "runs/log-batch", {{"run_id", run_id_}, {kind, entries}});
    entries.clear();
  }

  // The answer's body; null for a 404 where that is no mistake.
  nlohmann::json call(const std::string& method, const std::string& path, const nlohmann::json& body,
                      bool missing_is_null = false) {
    httplib::Client client(origin_);
    if (!client.is_valid()) fail_io("logger.mlflow.tracking_uri: '" + origin_ + "' is no address");
    client.set_connection_timeout(options_.timeout);
    client.set_read_timeout(options_.timeout);
    client.set_write_timeout(options_.timeout);
    if (!options_.token.empty()) client.set_bearer_token_auth(options_.token.c_str());
    if (options_.token.empty() && !options_.username.empty())
      client.set_basic_auth(options_.username.c_str(), options_.password.c_str());
    const std::string full = prefix_ + "/api/2.0/mlflow/" + path;
    const auto result = method == "GET"
                            ? client.Get(full)
                            : client.Post(full, body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                                          "application/json");
    const std::string where = origin_ + prefix_ + ": " + path.substr(0, path.find('?'));
    if (!result) fail_io(where + ": " + httplib::to_string(result.error()));
    if (missing_is_null && result->status == 404) return nullptr;
    if (result->status != 200)
      fail_io(where + ": HTTP " + std::to_string(result->status) + " " + result->body.substr(0, 200));
    auto answer = nlohmann::json::parse(result->body, nullptr, false);
    if (!answer.is_object()) fail_io(where + ": the answer is not JSON; is this an MLflow server?");
    return answer;
  }

  const MlflowOptions options_;
  std::string origin_, prefix_;
  std::string run_id_;
  bool params_sent_ = false;
};

}  // namespace

std::unique_ptr<Tracker> make_mlflow(const MlflowOptions& options) { return std::make_unique<Mlflow>(options); }

}  // namespace trireme
