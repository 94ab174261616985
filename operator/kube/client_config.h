// ClientConfig: where the apiserver is and how to prove who we are; from a pod's service account or a kubeconfig file.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace trireme::kube {

// Each of token, CA, certificate and key is either given inline or as a file that is read again when it changes.
struct ClientConfig {
  std::string scheme = "https";  // "http" is for tests and local proxies
  std::string host;              // name or address, IPv6 without brackets
  int port = 443;
  std::string path_prefix;  // of the server URL, without the last slash
  std::string server_name;  // verified instead of host when set (kubeconfig tls-server-name)

  std::string ca_pem;
  std::string ca_file;
  std::string client_cert_pem;
  std::string client_cert_file;
  std::string client_key_pem;
  std::string client_key_file;
  std::string token;
  std::string token_file;

  std::string default_namespace = "default";

  std::string url() const;  // for messages; holds no secret
};

// The service account of this pod: KUBERNETES_SERVICE_HOST/PORT are passed in by main, files below `root`
// (/var/run/secrets/kubernetes.io/serviceaccount). Throws Error(kUser) naming what is missing.
ClientConfig in_cluster_config(const std::string& service_host, const std::string& service_port,
                               const std::filesystem::path& root = "/var/run/secrets/kubernetes.io/serviceaccount");

// The subset of a kubeconfig that this client can honour: server, tls-server-name, certificate-authority(-data),
// client-certificate(-data), client-key(-data), token, tokenFile, namespace. insecure-skip-tls-verify: true, exec and
// auth-provider plug-ins, user names with passwords and proxies are refused with the key's name. `context` empty:
// current-context. Relative files are taken from `directory`. Throws Error(kUser).
ClientConfig parse_kubeconfig(std::string_view yaml, const std::filesystem::path& directory,
                              std::string_view context = {});
ClientConfig load_kubeconfig(const std::filesystem::path& path, std::string_view context = {});

// "https://host:6443/prefix" into scheme, host, port, path_prefix. Throws Error(kUser).
void set_server_url(ClientConfig& config, std::string_view url);

// RFC 4648 with padding; nothing when the text is not base64 (white space inside is allowed, as in YAML).
std::optional<std::string> base64_decode(std::string_view text);
std::string base64_encode(std::string_view bytes);

}  // namespace trireme::kube
