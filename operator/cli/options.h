// The operator's command line. Flags and the environment are read here and in main, nowhere else.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/log.h"

namespace trireme::cli {

struct OperatorOptions {
  std::string kubeconfig;  // empty: the pod's service account
  std::string context;
  std::string watch_namespace;                        // empty: all
  std::string operator_namespace = "trireme-system";  // of the lease, the Secret and the Services
  std::string pod_name;                               // identity; empty: host name
  std::string kubernetes_host, kubernetes_port;       // in-cluster API server

  bool leader_elect = true;
  std::string lease_name = "trireme-operator";
  int lease_duration_s = 15, renew_deadline_s = 10, retry_period_s = 2;

  // < 0: off; 0: the system chooses
  int metrics_port = 8080;
  int health_port = 8081;
  int status_port = 8090;
  int webhook_port = 9443;
  std::string address = "0.0.0.0";
  bool status_tls = true;  // with the webhook's certificate
  std::string status_url;  // what pods are told; empty: https://STATUS_SERVICE.NAMESPACE.svc:STATUS_PORT
  std::string status_service = "trireme-status";

  int workers = 64;
  int write_threads = 64;
  double qps = 1000;
  int burst = 2000;
  bool watch_nodes = true;
  bool network_policies = true;  // one a job
  std::string scraped_by =       // peers that those let to the metrics ports, as JSON
      R"([{"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"monitoring"}}}])";
  bool do_not_disrupt = true;
  std::string backend = "auto";
  std::string default_image;

  std::string webhook_service = "trireme-webhook";
  std::string webhook_secret = "trireme-webhook-cert";
  std::string validating_configuration = "trireme-validating";
  std::string mutating_configuration = "trireme-mutating";
  std::string webhook_cert_file, webhook_key_file, webhook_ca_file;

  int sync_timeout_s = 300;
  int discovery_interval_s = 60;       // between two looks at which gang back-ends the cluster serves (no flag)
  size_t trim_above_bytes = 8u << 20;  // freed memory that is worth giving back to the system (no flag)
  int shutdown_timeout_s = 25;
  LogOptions log;
};

struct ParsedOptions {
  OperatorOptions options;
  bool exit = false;  // help, version or a mistake: print `message` and exit with `exit_code`
  int exit_code = 0;
  std::string message;
};

// `environment` returns "" for what is not set. Every flag --some-name can also be given as TRIREME_OPERATOR_SOME_NAME.
ParsedOptions parse_options(const std::vector<std::string>& arguments,
                            const std::function<std::string(const std::string&)>& environment);

}  // namespace trireme::cli
