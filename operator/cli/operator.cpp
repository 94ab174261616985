#include "operator/cli/operator.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <random>

#include "api/rljob.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/controller/job_metrics.h"
#include "operator/controller/network_policy.h"
#include "operator/kube/api_error.h"
#include "operator/kube/heap.h"

namespace trireme::cli {
namespace {

using nlohmann::json;

constexpr Milliseconds kPoll{50};
constexpr Milliseconds kStuck{300000};  // a reconcile ends long before
constexpr Milliseconds kHeapLook{5000};

std::string make_identity(const std::string& pod_name) {
  char host[256] = "operator";
  ::gethostname(host, sizeof host - 1);
  std::random_device random;
  char suffix[17];
  std::snprintf(suffix, sizeof suffix, "%08x%08x", random(), random());
  return (pod_name.empty() ? host : pod_name) + std::string("_") + suffix;
}

kube::ClientOptions client_options(const OperatorOptions& options, kube::Metrics& metrics) {
  kube::ClientOptions out;
  // A connection for every thread that may ask at once, and some for events, certificates and discovery: nobody waits
  // for another's answer.
  out.max_connections = options.workers + options.write_threads + 16;
  out.qps = options.qps;
  out.burst = options.burst;
  out.metrics = &metrics;
  return out;
}

kube::ClientOptions elector_options(kube::Metrics& metrics) {
  kube::ClientOptions out;
  out.max_connections = 4;
  out.metrics = &metrics;
  return out;
}

kube::ClientOptions reviewer_options(kube::Metrics& metrics) {
  kube::ClientOptions out;
  out.max_connections = 8;
  out.qps = 50;
  out.burst = 200;  // jobs that report all at once after a change of leader
  out.metrics = &metrics;
  return out;
}

kube::EventRecorderOptions event_options(const std::string& identity, kube::Metrics& metrics) {
  kube::EventRecorderOptions out;
  out.instance = identity.substr(0, identity.find('_'));
  out.metrics = &metrics;
  return out;
}

void process_metrics(kube::Metrics& metrics) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double cpu = static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                     static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
  metrics.gauge("process_cpu_seconds_total", "User and system CPU seconds of this process.").Set(cpu);
  long pages = 0, resident = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%ld %ld", &pages, &resident) == 2) {
      metrics.gauge("process_resident_memory_bytes", "Resident memory of this process.")
          .Set(static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)));
    }
    std::fclose(file);
  }
}

const json* schema_of(const json& crd) {
  const auto spec = crd.find("spec");
  if (spec == crd.end() || !spec->is_object() || !spec->contains("versions")) return nullptr;
  for (const json& version : (*spec)["versions"]) {
    if (!version.is_object() || version.value("name", std::string()) != "v1alpha1") continue;
    const json::json_pointer path("/schema/openAPIV3Schema/properties");
    return version.contains(path) ? &version[path] : nullptr;
  }
  return nullptr;
}

void compare(const json& sample, const json& properties, const std::string& path, std::vector<std::string>& missing) {
  for (const auto& [key, value] : sample.items()) {
    if (!properties.contains(key)) {
      missing.push_back(path + "." + key);
      continue;
    }
    const json& known = properties[key];
    if (value.is_object() && known.contains("properties"))
      compare(value, known["properties"], path + "." + key, missing);
  }
}

}  // namespace

std::vector<std::string> missing_crd_fields(const json& crd) {
  const json* schema = schema_of(crd);
  if (!schema) return {"spec.versions[v1alpha1].schema"};
  // Every field with a default, and every status field that the controller writes.
  RLJobStatus status;
  status.phase = status.waiting = status.start_time = status.admitted_time = status.attempt_start_time =
      status.running_time = status.completion_time = status.config_hash = status.reservation = "x";
  status.observed_generation = status.attempt = status.restarts = status.free_restarts = status.budget_used =
      status.window_step = status.free_streak = status.free_step = 1;
  status.conditions = {{"a", "b", "c", "d", "e", std::nullopt}};
  status.roles = {RoleStatus{"actor", 1, 1, 1, 1, 1, 1, 1, 1, "s"}};
  status.generation = ScaleStatus{1, "s"};
  status.progress = Progress{};
  status.last_failure = LastFailure{};
  status.avoided_nodes = {{"a", "b", "c"}};
  status.rendezvous = Rendezvous{"m", 1, "t"};
  std::vector<std::string> missing;
  const json sample = {{"spec", spec_to_json(RLJobSpec{})}, {"status", status_to_json(status)}};
  for (const char* part : {"spec", "status"}) {
    if (!schema->contains(part) || !(*schema)[part].contains("properties")) {
      missing.push_back(part);
    } else {
      compare(sample[part], (*schema)[part]["properties"], part, missing);
    }
  }
  return missing;
}

scheduling::Discovery discover(const kube::Client& client) {
  scheduling::Discovery found;
  for (const std::string& group_version : scheduling::group_versions_of_interest()) {
    kube::RawRequest request;
    request.path = "/apis/" + group_version;
    request.what = "discover " + group_version;
    const kube::RawResponse response = client.raw(request, client.default_deadline());
    if (response.status == 404 || response.status == 403) continue;
    if (response.status != 200)
      throw kube::ApiError::from_response(request.what, response.status, response.body, response.retry_after);
    const json list = json::parse(response.body, nullptr, false);
    if (!list.is_object() || !list.contains("resources") || !list["resources"].is_array()) continue;
    for (const json& resource : list["resources"]) {
      if (resource.is_object()) found[group_version].insert(resource.value("name", std::string()));
    }
  }
  return found;
}

Operator::Operator(kube::ClientConfig config, OperatorOptions options, Tune tune)
    : options_(std::move(options)),
      identity_(make_identity(options_.pod_name)),
      client_(config, client_options(options_, metrics_)),
      elector_client_(config, elector_options(metrics_)),
      reviewer_(std::move(config), reviewer_options(metrics_)),
      events_(client_, event_options(identity_, metrics_)),
      tune_(std::move(tune)) {
  // Here and not in run(): leading() is asked by other threads.
  if (options_.leader_elect) {
    kube::LeaderOptions lease;
    lease.lease_namespace = options_.operator_namespace;
    lease.lease_name = options_.lease_name;
    lease.identity = identity_;
    lease.lease_duration = Milliseconds(options_.lease_duration_s * 1000);
    lease.renew_deadline = Milliseconds(options_.renew_deadline_s * 1000);
    lease.retry_period = Milliseconds(options_.retry_period_s * 1000);
    lease.metrics = &metrics_;
    kube::LeaderCallbacks callbacks;
    callbacks.on_lost = [this] { lost_ = true; };
    callbacks.on_new_leader = [](const std::string& identity) { log_info("operator", "the leader is " + identity); };
    elector_ = std::make_unique<kube::LeaderElector>(elector_client_, std::move(lease), std::move(callbacks));
  }
}

Operator::~Operator() { shut_down(); }

bool Operator::leading() const { return !stopping_ && (elector_ ? elector_->is_leader() : working_.load()); }

void Operator::write_metrics(const kube::HttpWrite& write) {
  process_metrics(metrics_);
  const auto reconciler = this->reconciler();
  if (reconciler) {
    const std::string help = "Objects held by the informers.";
    metrics_.gauge("trireme_informer_objects", help, {{"resource", "rljobs"}})
        .Set(static_cast<double>(reconciler->job_count()));
    metrics_.gauge("trireme_informer_objects", help, {{"resource", "pods"}})
        .Set(static_cast<double>(reconciler->pod_count()));
  }
  if (certificates_ && certificates_->expires_unix_s() > 0) {
    metrics_
        .gauge("trireme_webhook_certificate_expiry_timestamp_seconds",
               "When the webhook's certificate expires, unix time.")
        .Set(static_cast<double>(certificates_->expires_unix_s()));
  }
  if (!write(metrics_.text())) return;
  if (reconciler && leading()) controller::write_job_metrics(*reconciler, reports_, write);
}

void Operator::check_crd() {
  const std::string name = "rljobs.trireme.dev";
  const std::string advice = "kubectl apply --server-side -f crds/trireme.dev_rljobs.yaml";
  std::optional<json> crd;
  try {
    crd = client_.find(kube::resources::kCustomResourceDefinitions, {"", name});
  } catch (const kube::ApiError& e) {
    if (e.kind() != kube::ApiErrorKind::kForbidden) throw;
    log_warn("operator", "may not read CustomResourceDefinitions: whether " + name + " is new enough is not checked");
    return;
  }
  if (!crd) fail_user("CustomResourceDefinition " + name + " is not installed: " + advice);
  const std::vector<std::string> missing = missing_crd_fields(*crd);
  metrics_.gauge("trireme_crd_outdated", "1 if the installed CRD lacks fields that this operator uses.")
      .Set(missing.empty() ? 0 : 1);
  if (missing.empty()) return;
  log_error("operator", "the installed CustomResourceDefinition " + name + " is older than this operator and drops " +
                            join(missing, ", ") + ": " + advice);
}

void Operator::make_reconciler() {
  controller::ReconcilerOptions options;
  options.ns = options_.watch_namespace;
  options.workers = options_.workers;
  options.write_threads = options_.write_threads;
  options.watch_nodes = options_.watch_nodes;
  options.metrics = &metrics_;
  options.events = &events_;
  if (options_.leader_elect) options.may_write = [this] { return elector_ && elector_->is_leader(); };
  options.plan.default_backend = options_.backend;
  options.plan.discovery = discovery_;
  options.plan.objects.network_policies = options_.network_policies;
  options.plan.objects.scraped_by = controller::parse_policy_peers(options_.scraped_by);
  options.plan.objects.do_not_disrupt = options_.do_not_disrupt;
  if (options_.status_port >= 0) {
    options.plan.objects.status_url = !options_.status_url.empty()
                                          ? options_.status_url
                                          : (status_tls() ? "https://" : "http://") + status_service_name() + ":" +
                                                std::to_string(options_.status_port);
    if (status_tls()) {
      options.plan.objects.status_ca = [this] { return certificates_ ? certificates_->ca_pem() : std::string(); };
    }
    status_url_ = options.plan.objects.status_url;
    options.own_path = [this] { return path_probe_ ? path_probe_->found() : controller::OwnPath{}; };
  }
  if (tune_) tune_(options);
  discovery_ = options.plan.discovery;
  auto made = std::make_shared<controller::Reconciler>(client_, std::move(options), reports_);
  std::lock_guard lock(reconciler_mutex_);
  reconciler_ = std::move(made);
}

std::shared_ptr<controller::Reconciler> Operator::reconciler() const {
  std::lock_guard lock(reconciler_mutex_);
  return reconciler_;
}

void Operator::say_backend() const {
  try {
    const auto chosen = scheduling::choose_backend(options_.backend, false, discovery_);
    log_info("operator", std::string("gang scheduling of jobs with backend Auto: ") +
                             scheduling::to_string(chosen.kind) +
                             (chosen.version.empty() ? "" : " (" + chosen.version + ")"));
  } catch (const Error& e) {
    log_warn("operator", std::string("gang scheduling of jobs with backend Auto: ") + e.what());
  }
}

// A gang scheduler that is installed (or upgraded) later is used without a restart of the operator.
void Operator::rediscover() {
  try {
    scheduling::Discovery found = discover(client_);
    if (found == discovery_) return;
    discovery_ = found;
    say_backend();
    reconciler()->set_discovery(std::move(found));
  } catch (const std::exception& e) {
    log_debug("operator", std::string("gang back-ends could not be looked up: ") + e.what());
  }
}

void Operator::start_servers() {
  auto server = [&](const char* name, int port) {
    kube::HttpServerOptions options;
    options.name = name;
    options.address = options_.address;
    options.port = port;
    options.max_threads = 2;
    return std::make_unique<kube::HttpServer>(std::move(options));
  };
  health_.add_liveness("workers", [this]() -> std::optional<std::string> {
    const auto reconciler = this->reconciler();
    if (!reconciler || reconciler->stuck_for() < kStuck) return std::nullopt;
    return "no reconcile has begun or ended for " + std::to_string(reconciler->stuck_for().count() / 1000) + " s";
  });
  health_.add_readiness("informers", [this]() -> std::optional<std::string> {
    if (synced_once_) return std::nullopt;
    return "the first lists are not complete";
  });
  health_.add_readiness("shutdown", [this]() -> std::optional<std::string> {
    if (!stopping_) return std::nullopt;
    return "shutting down";
  });
  if (options_.webhook_port >= 0) {
    webhook::WebhookServerOptions hook;
    hook.address = options_.address;
    hook.port = options_.webhook_port;
    hook.defaulting.image = options_.default_image;
    hook.metrics = &metrics_;
    webhook_server_ = std::make_unique<webhook::WebhookServer>(std::move(hook));
  }
  if (options_.status_port >= 0) start_status_server();
  if (certificate_needed()) start_certificates();
  if (options_.metrics_port >= 0) {
    metrics_server_ = server("metrics", options_.metrics_port);
    metrics_server_->handle("GET", "/metrics", [this](const kube::HttpRequest&) {
      kube::HttpResponse response;
      response.stream = [this](const kube::HttpWrite& write) { write_metrics(write); };
      response.content_type = kube::Metrics::content_type();
      return response;
    });
    metrics_server_->start();
    metrics_port_ = metrics_server_->port();
  }
  if (options_.health_port >= 0) {
    health_server_ = server("health", options_.health_port);
    health_.install(*health_server_);
    health_server_->start();
    health_port_ = health_server_->port();
  }
}

std::string Operator::status_service_name() const {
  return options_.status_service + "." + options_.operator_namespace + ".svc";
}

void Operator::start_status_server() {
  telemetry::StatusServerOptions status;
  status.address = options_.address;
  status.port = options_.status_port;
  status.metrics = &metrics_;
  status.tls = status_tls();
  status.tls_name = status_service_name();
  status.ca_pem = [this] { return certificates_ ? certificates_->ca_pem() : std::string(); };
  if (options_.leader_elect) {
    status.is_leader = [this] { return leading(); };
    status.leader_address = [this] { return leader_status_address(); };
  }
  status_server_ = std::make_unique<telemetry::StatusServer>(
      reviewer_, reports_, [this](const kube::ObjectKey& key) { return reconciler()->find_pod(key); },
      [this](const kube::ObjectKey& key) { return reconciler()->find_job(key); }, std::move(status));
  status_server_->start();
  status_port_ = status_server_->port();
  path_probe_ = std::make_unique<telemetry::PathProbe>(status_url_);
}

// One certificate for the webhook and the status server.
void Operator::start_certificates() {
  health_.add_readiness("certificate", [this]() -> std::optional<std::string> {
    if (certificates_ && certificates_->ready()) return std::nullopt;
    return "no certificate yet";
  });
  webhook::CertificateOptions certificate;
  certificate.ns = options_.operator_namespace;
  certificate.secret_name = options_.webhook_secret;
  certificate.service_name = options_.webhook_port >= 0 ? options_.webhook_service : "";
  if (status_tls()) certificate.status_service_name = options_.status_service;
  certificate.validating_configuration = options_.webhook_port >= 0 ? options_.validating_configuration : "";
  certificate.mutating_configuration = options_.webhook_port >= 0 ? options_.mutating_configuration : "";
  certificate.cert_file = options_.webhook_cert_file;
  certificate.key_file = options_.webhook_key_file;
  certificate.ca_file = options_.webhook_ca_file;
  certificates_ =
      std::make_unique<webhook::CertificateKeeper>(client_, std::move(certificate), [this](const kube::KeyPair& pair) {
        if (webhook_server_) webhook_server_->set_certificate(pair);
        if (!status_tls()) return;
        status_server_->set_certificate(pair);
        status_port_ = status_server_->port();
      });
  certificates_->start();
}

// The identity begins with the leader's pod name; its address is asked for once per leader.
std::string Operator::leader_status_address() {
  const std::string identity = elector_ ? elector_->leader() : "";
  if (identity.empty() || identity == identity_) return "";
  {
    std::lock_guard lock(leader_mutex_);
    if (leader_identity_ == identity && !leader_address_.empty()) return leader_address_;
  }
  std::string address;
  try {
    const auto pod =
        client_.find(kube::resources::kPods, {options_.operator_namespace, identity.substr(0, identity.find('_'))});
    if (pod) address = pod->value("status", json::object()).value("podIP", std::string());
  } catch (const kube::ApiError& e) {
    log_warn("operator", std::string("where the leader is: ") + e.what());
  }
  if (address.empty()) return "";
  if (address.find(':') != std::string::npos) address = "[" + address + "]";
  address += ":" + std::to_string(options_.status_port);
  std::lock_guard lock(leader_mutex_);
  leader_identity_ = identity;
  leader_address_ = address;
  return address;
}

void Operator::wait_synced(const std::atomic<bool>& stop) {
  const Stopwatch watch;
  const auto reconciler = this->reconciler();
  reconciler->start_informers();
  const Deadline synced_by = Deadline::after(Milliseconds(options_.sync_timeout_s * 1000));
  while (!reconciler->synced() && !stop) {
    if (synced_by.passed())
      fail_timeout("the first lists of RLJobs, pods, services and nodes did not come within --sync-timeout");
    reconciler->wait_synced(Deadline::after(kPoll));
  }
  synced_once_ = synced_once_ || reconciler->synced();
  log_info("operator", "informers hold " + std::to_string(reconciler->job_count()) + " RLJobs and " +
                           std::to_string(reconciler->pod_count()) + " pods after " + format_fixed(watch.seconds(), 2) +
                           " s");
}

// Somebody else may act now. Workers end after the reconcile they are in, which writes nothing more; all that was known
// of the cluster goes, as if the process had ended. It does not: admission is served on.
void Operator::stand_down() {
  log_error("operator", "the lease was lost: somebody else may act now, this one stands by again");
  working_ = false;
  reconciler()->stop();
  reports_.clear();
  make_reconciler();
}

int Operator::run(const std::atomic<bool>& stop) {
  check_crd();
  discovery_ = discover(client_);
  make_reconciler();
  say_backend();
  start_servers();
  wait_synced(stop);
  // Whoever has no copy of the cluster yet does not ask for the lease.
  if (elector_ && !stop) elector_->start();
  SteadyClock::time_point look_again = SteadyClock::now() + std::chrono::seconds(options_.discovery_interval_s);
  kube::HeapTrims trims(options_.trim_above_bytes);
  SteadyClock::time_point heap_again = SteadyClock::now();
  while (!stop) {
    if (lost_.exchange(false)) {
      stand_down();
      wait_synced(stop);
      if (!stop) elector_->stand_again();
    }
    // Thousands of jobs made in a row leave more freed memory between what stays than all that stays.
    if (const auto now = SteadyClock::now(); now >= heap_again) {
      if (trims.due(kube::heap_size(), now)) {
        kube::trim_heap();
        trims.trimmed(kube::heap_size(), now);
      }
      heap_again = now + kHeapLook;
    }
    if (SteadyClock::now() >= look_again) {
      rediscover();
      look_again = SteadyClock::now() + std::chrono::seconds(options_.discovery_interval_s);
    }
    // Pods get the CA of the status server, so there must be one.
    const bool able = !status_tls() || certificates_->handed_over();
    if (!working_ && able && (!elector_ || elector_->is_leader())) {
      working_ = true;
      reconciler()->start_workers();
      log_info("operator", "leading as " + identity_);
    }
    std::this_thread::sleep_for(kPoll);
  }
  shut_down();
  return 0;
}

// The lease goes as soon as nothing more is written, so that the next leader need not wait for our servers to drain.
void Operator::shut_down() {
  if (stopping_.exchange(true)) return;
  const Deadline deadline = Deadline::after(Milliseconds(options_.shutdown_timeout_s * 1000));
  const auto reconciler = this->reconciler();
  if (reconciler) reconciler->stop_workers();
  if (elector_) elector_->stop();
  events_.flush(Deadline::after(std::min(deadline.remaining(), Milliseconds(5000))));
  if (status_server_) status_server_->stop();
  if (certificates_) certificates_->stop();
  if (webhook_server_) webhook_server_->stop();
  if (reconciler) reconciler->stop();
  events_.stop();
  if (metrics_server_) metrics_server_->stop();
  if (health_server_) health_server_->stop();
}

int operator_main(const std::vector<std::string>& arguments,
                  const std::function<std::string(const std::string&)>& environment, const std::atomic<bool>& stop) {
  const ParsedOptions parsed = parse_options(arguments, environment);
  if (parsed.exit) {
    std::fputs(parsed.message.c_str(), parsed.exit_code == 0 ? stdout : stderr);
    return parsed.exit_code == 0 ? 0 : 2;
  }
  const OperatorOptions& options = parsed.options;
  log_setup(options.log);
  try {
    kube::ClientConfig config = options.kubeconfig.empty()
                                    ? kube::in_cluster_config(options.kubernetes_host, options.kubernetes_port)
                                    : kube::load_kubeconfig(options.kubeconfig, options.context);
    log_info("operator", "API server " + config.url());
    Operator program(std::move(config), options);
    return program.run(stop);
  } catch (const std::exception& e) {
    log_error("operator", e.what());
    return 1;
  }
}

}  // namespace trireme::cli
