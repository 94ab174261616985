#include "operator/cli/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "operator/controller/network_policy.h"

namespace trireme::cli {
namespace {

std::string environment_name(const std::string& flag) {
  std::string name = "TRIREME_OPERATOR_" + flag.substr(2);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](char c) { return c == '-' ? '_' : static_cast<char>(std::toupper(c)); });
  return name;
}

// What every job gets.
void add_job_flags(CLI::App& app, OperatorOptions& o) {
  app.add_flag(
      "--network-policies,!--no-network-policies", o.network_policies,
      "make a NetworkPolicy for each job: only its own pods, and on the metrics port --scraped-by, may connect "
      "to its pods; needs rights to networkpolicies");
  app.add_option("--scraped-by", o.scraped_by, "NetworkPolicy peers that may scrape jobs, as a JSON list; []: nobody");
  app.add_flag("--do-not-disrupt,!--no-do-not-disrupt", o.do_not_disrupt,
               "annotate pods so that cluster autoscalers do not remove their nodes");
}

// What no flag can say for itself. Throws CLI::ValidationError.
void check_together(const OperatorOptions& o) {
  if (o.webhook_cert_file.empty() != o.webhook_key_file.empty()) {
    throw CLI::ValidationError("--webhook-cert-file and --webhook-key-file belong together");
  }
  if (o.status_tls && o.status_url.rfind("http://", 0) == 0)
    throw CLI::ValidationError("--status-url begins with http:// but reports are taken over TLS: --no-status-tls");
  try {
    controller::parse_policy_peers(o.scraped_by);
  } catch (const Error& e) {
    throw CLI::ValidationError(std::string("--scraped-by: ") + e.what());
  }
  if (o.renew_deadline_s >= o.lease_duration_s)
    throw CLI::ValidationError("--renew-deadline must be less than --lease-duration");
}

// Whose jobs, as whom, and when this replica acts.
void add_identity_flags(CLI::App& app, OperatorOptions& o) {
  app.add_option("--kubeconfig", o.kubeconfig, "kubeconfig file; without it the pod's service account is used");
  app.add_option("--context", o.context, "context of the kubeconfig");
  app.add_option("--namespace", o.watch_namespace, "manage RLJobs of this namespace only");
  app.add_option("--operator-namespace", o.operator_namespace,
                 "namespace of the lease, the webhook's Secret and the Services");
  app.add_option("--pod-name", o.pod_name, "this replica's identity");
  app.add_flag("--leader-elect,!--no-leader-elect", o.leader_elect, "act only while holding the lease");
  app.add_option("--lease-name", o.lease_name, "name of the lease");
  app.add_option("--lease-duration", o.lease_duration_s, "seconds that a lease is valid")->check(CLI::Range(2, 3600));
  app.add_option("--renew-deadline", o.renew_deadline_s, "seconds without renewal after which a leader stops")
      ->check(CLI::Range(1, 3600));
  app.add_option("--retry-period", o.retry_period_s, "seconds between attempts to get or renew the lease")
      ->check(CLI::Range(1, 3600));
}

void add_server_flags(CLI::App& app, OperatorOptions& o) {
  const CLI::Range port(-1, 65535);
  app.add_option("--address", o.address, "address that all servers listen on");
  app.add_option("--metrics-port", o.metrics_port, "/metrics; -1: off")->check(port);
  app.add_option("--health-port", o.health_port, "/healthz and /readyz; -1: off")->check(port);
  app.add_option("--status-port", o.status_port, "status reports of trainers; -1: off")->check(port);
  app.add_option("--webhook-port", o.webhook_port, "admission webhooks; -1: off")->check(port);
  app.add_flag("--status-tls,!--no-status-tls", o.status_tls,
               "serve status reports over TLS with the webhook's certificate; pods get its CA");
  app.add_option("--status-url", o.status_url, "base URL that pods report to");
  app.add_option("--status-service", o.status_service, "Service of the status port, for the default of --status-url");
  app.add_option("--webhook-service", o.webhook_service, "Service in front of the webhook port");
  app.add_option("--webhook-secret", o.webhook_secret, "Secret that holds the self-made certificate");
  app.add_option("--webhook-validating", o.validating_configuration,
                 "ValidatingWebhookConfiguration whose caBundle is kept up to date; empty: none");
  app.add_option("--webhook-mutating", o.mutating_configuration,
                 "MutatingWebhookConfiguration whose caBundle is kept up to date; empty: none");
  app.add_option("--webhook-cert-file", o.webhook_cert_file,
                 "certificate file (cert-manager); with --webhook-key-file");
  app.add_option("--webhook-key-file", o.webhook_key_file, "key file");
  app.add_option("--webhook-ca-file", o.webhook_ca_file,
                 "CA of the certificate file, with which pods verify the status server (default: the system's)");
}

void add_work_flags(CLI::App& app, OperatorOptions& o) {
  app.add_option("--workers", o.workers, "jobs reconciled at once")->check(CLI::Range(1, 256));
  app.add_option("--write-threads", o.write_threads, "threads for parallel writes")->check(CLI::Range(1, 256));
  app.add_option("--qps", o.qps, "API requests per second; 0: no limit")->check(CLI::Range(0.0, 1e6));
  app.add_option("--burst", o.burst, "API requests in a burst")->check(CLI::Range(1, 1000000));
  app.add_flag("--watch-nodes,!--no-watch-nodes", o.watch_nodes,
               "notice lost nodes early; needs get, list and watch on nodes");
  add_job_flags(app, o);
  app.add_option("--scheduling-backend", o.backend,
                 "gang scheduler of jobs with backend Auto: auto, none, kubernetes, kueue, volcano, coscheduling, kai");
  app.add_option("--default-image", o.default_image, "trainer image of jobs that name none, or name the API's default");
  app.add_option("--sync-timeout", o.sync_timeout_s, "seconds that the first lists may take")
      ->check(CLI::Range(1, 86400));
  app.add_option("--shutdown-timeout", o.shutdown_timeout_s, "seconds that a graceful shutdown may take")
      ->check(CLI::Range(1, 3600));
}

// Flags win over the environment: what the command line names is not taken from there.
std::vector<std::string> with_environment(const CLI::App& app, const std::vector<std::string>& arguments,
                                          const std::function<std::string(const std::string&)>& environment) {
  std::vector<std::string> all = arguments;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_lnames().empty() || option->get_lnames()[0] == "help") continue;
    const std::string flag = "--" + option->get_lnames()[0];
    const std::string value = environment(environment_name(flag));
    const bool named = std::any_of(arguments.begin(), arguments.end(),
                                   [&](const std::string& a) { return a == flag || a.rfind(flag + "=", 0) == 0; });
    if (!value.empty() && !named) all.push_back(flag + "=" + value);
  }
  return all;
}

}  // namespace

ParsedOptions parse_options(const std::vector<std::string>& arguments,
                            const std::function<std::string(const std::string&)>& environment) {
  ParsedOptions parsed;
  OperatorOptions& o = parsed.options;
  o.kubernetes_host = environment("KUBERNETES_SERVICE_HOST");
  o.kubernetes_port = environment("KUBERNETES_SERVICE_PORT");
  o.pod_name = environment("POD_NAME");
  if (const std::string ns = environment("POD_NAMESPACE"); !ns.empty()) o.operator_namespace = ns;

  CLI::App app{"Trireme's operator: runs RLJobs (trireme.dev/v1alpha1) on Kubernetes.", "trireme-operator"};
  std::string log_format = "text", log_level = "info";
  add_identity_flags(app, o);
  add_server_flags(app, o);
  add_work_flags(app, o);
  app.add_option("--log-format", log_format, "text or json")->check(CLI::IsMember({"text", "json"}));
  app.add_option("--log-level", log_level, "debug, info, warn or error")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}));

  std::vector<std::string> all = with_environment(app, arguments, environment);
  std::reverse(all.begin(), all.end());  // CLI11 takes them from the back
  try {
    app.parse(all);
    check_together(o);
  } catch (const CLI::ParseError& e) {
    std::ostringstream out, err;
    parsed.exit_code = app.exit(e, out, err);
    parsed.exit = true;
    parsed.message = out.str() + err.str();
    return parsed;
  }
  o.log.format = log_format == "json" ? LogFormat::kJson : LogFormat::kText;
  o.log.level = log_level == "debug"   ? LogLevel::kDebug
                : log_level == "warn"  ? LogLevel::kWarn
                : log_level == "error" ? LogLevel::kError
                                       : LogLevel::kInfo;
  return parsed;
}

}  // namespace trireme::cli
