#include "operator/kube/client_config.h"

#include <yaml-cpp/yaml.h>

#include <array>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"

namespace trireme::kube {
namespace {

// Maps of a hostile file can be deep or odd: every access goes through here and says what it wanted.
YAML::Node child(const YAML::Node& node, const std::string& key, const std::string& where) {
  if (!node.IsMap()) fail_user("kubeconfig: " + where + " is not a map");
  return node[key];
}

std::string text(const YAML::Node& map, const std::string& key, const std::string& where) {
  const YAML::Node node = child(map, key, where);
  if (!node || node.IsNull()) return {};
  if (!node.IsScalar()) fail_user("kubeconfig: " + where + "." + key + " is not text");
  return node.Scalar();
}

std::string decoded(const YAML::Node& map, const std::string& key, const std::string& where) {
  const std::string encoded = text(map, key, where);
  if (encoded.empty()) return {};
  auto bytes = base64_decode(encoded);
  if (!bytes) fail_user("kubeconfig: " + where + "." + key + " is not base64");
  return *bytes;
}

// The entry called `name` in clusters, users or contexts, and there the map below `key`.
YAML::Node named(const YAML::Node& root, const std::string& list, const std::string& key, const std::string& name) {
  const YAML::Node entries = child(root, list, "the file");
  if (!entries || !entries.IsSequence()) fail_user("kubeconfig: the list " + list + " is missing");
  for (const YAML::Node& entry : entries) {
    if (text(entry, "name", list + "[]") != name) continue;
    const YAML::Node found = child(entry, key, list + "[]");
    if (!found || !found.IsMap())
      fail_user("kubeconfig: " + key + " of " + list + " entry '" + name + "' is not a map");
    return found;
  }
  fail_user("kubeconfig: no entry '" + name + "' in " + list);
}

std::string file_path(const std::string& path, const std::filesystem::path& directory) {
  if (path.empty()) return {};
  const std::filesystem::path p(path);
  return p.is_absolute() ? path : (directory / p).lexically_normal().string();
}

ClientConfig from_yaml(const YAML::Node& root, const std::filesystem::path& directory, std::string_view context_name) {
  if (!root.IsMap()) fail_user("kubeconfig: the file is not a YAML map");
  std::string name(context_name);
  if (name.empty()) name = text(root, "current-context", "the file");
  if (name.empty()) fail_user("kubeconfig: current-context is not set; set it or name a context");
  const YAML::Node context = named(root, "contexts", "context", name);
  const std::string where_context = "context '" + name + "'";
  const std::string cluster_name = text(context, "cluster", where_context);
  const std::string user_name = text(context, "user", where_context);
  const YAML::Node cluster = named(root, "clusters", "cluster", cluster_name);
  const std::string where_cluster = "cluster '" + cluster_name + "'";

  ClientConfig config;
  const std::string server = text(cluster, "server", where_cluster);
  if (server.empty()) fail_user("kubeconfig: " + where_cluster + " has no server");
  set_server_url(config, server);
  const std::string insecure = text(cluster, "insecure-skip-tls-verify", where_cluster);
  if (!insecure.empty() && insecure != "false") {
    fail_user("kubeconfig: insecure-skip-tls-verify of " + where_cluster +
              " is not supported; give certificate-authority or certificate-authority-data instead");
  }
  if (!text(cluster, "proxy-url", where_cluster).empty())
    fail_user("kubeconfig: proxy-url of " + where_cluster + " is not supported");
  config.server_name = text(cluster, "tls-server-name", where_cluster);
  config.ca_pem = decoded(cluster, "certificate-authority-data", where_cluster);
  if (config.ca_pem.empty())
    config.ca_file = file_path(text(cluster, "certificate-authority", where_cluster), directory);
  if (config.scheme == "https" && config.ca_pem.empty() && config.ca_file.empty()) {
    fail_user("kubeconfig: " + where_cluster + " has neither certificate-authority nor certificate-authority-data");
  }

  if (!user_name.empty()) {
    const YAML::Node user = named(root, "users", "user", user_name);
    const std::string where = "user '" + user_name + "'";
    for (const char* key : {"exec", "auth-provider", "username", "password", "as"}) {
      if (child(user, key, where)) {
        fail_user("kubeconfig: " + std::string(key) + " of " + where +
                  " is not supported; use a client certificate or a token");
      }
    }
    config.client_cert_pem = decoded(user, "client-certificate-data", where);
    if (config.client_cert_pem.empty())
      config.client_cert_file = file_path(text(user, "client-certificate", where), directory);
    config.client_key_pem = decoded(user, "client-key-data", where);
    if (config.client_key_pem.empty()) config.client_key_file = file_path(text(user, "client-key", where), directory);
    const bool has_cert = !config.client_cert_pem.empty() || !config.client_cert_file.empty();
    const bool has_key = !config.client_key_pem.empty() || !config.client_key_file.empty();
    if (has_cert != has_key)
      fail_user("kubeconfig: " + where + " needs both a client certificate and its key, or neither");
    config.token_file = file_path(text(user, "tokenFile", where), directory);
    if (config.token_file.empty()) config.token = text(user, "token", where);
    if (config.token.find_first_of("\r\n") != std::string::npos)
      fail_user("kubeconfig: token of " + where + " has a line break in it");
  }
  const std::string ns = text(context, "namespace", where_context);
  if (!ns.empty()) config.default_namespace = ns;
  return config;
}

}  // namespace

std::string ClientConfig::url() const {
  const bool v6 = host.find(':') != std::string::npos;
  return scheme + "://" + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port) + path_prefix;
}

void set_server_url(ClientConfig& config, std::string_view url) {
  const std::string shown(url.substr(0, 200));
  const size_t mark = url.find("://");
  if (mark == std::string_view::npos) fail_user("server '" + shown + "' is not a URL such as https://host:6443");
  config.scheme = to_lower(url.substr(0, mark));
  if (config.scheme != "https" && config.scheme != "http")
    fail_user("server '" + shown + "': only https and http are supported");
  std::string_view rest = url.substr(mark + 3);
  const size_t slash = rest.find('/');
  std::string_view authority = rest.substr(0, slash);
  std::string_view prefix = slash == std::string_view::npos ? std::string_view() : rest.substr(slash);
  while (!prefix.empty() && prefix.back() == '/') prefix.remove_suffix(1);
  if (url.find_first_of("?#@ \t\r\n") != std::string_view::npos) {
    fail_user("server '" + shown + "' must not have a user, a query, a fragment or blanks");
  }
  std::string_view port;
  if (!authority.empty() && authority.front() == '[') {
    const size_t close = authority.find(']');
    if (close == std::string_view::npos) fail_user("server '" + shown + "': the address has no closing bracket");
    config.host = std::string(authority.substr(1, close - 1));
    port = authority.substr(close + 1);
    if (!port.empty() && port.front() != ':') fail_user("server '" + shown + "': text follows the closing bracket");
  } else {
    const size_t colon = authority.find(':');
    if (colon != std::string_view::npos && authority.find(':', colon + 1) != std::string_view::npos) {
      fail_user("server '" + shown + "': an IPv6 address needs brackets");
    }
    config.host = std::string(authority.substr(0, colon));
    port = colon == std::string_view::npos ? std::string_view() : authority.substr(colon);
  }
  if (config.host.empty()) fail_user("server '" + shown + "' has no host");
  config.port = config.scheme == "https" ? 443 : 80;
  if (!port.empty()) {
    const auto number = parse_int(port.substr(1));
    if (!number || *number < 1 || *number > 65535)
      fail_user("server '" + shown + "': the port is not a number from 1 to 65535");
    config.port = static_cast<int>(*number);
  }
  config.path_prefix = std::string(prefix);
}

ClientConfig in_cluster_config(const std::string& service_host, const std::string& service_port,
                               const std::filesystem::path& root) {
  if (service_host.empty() || service_port.empty()) {
    fail_user(
        "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: not inside a pod; give a kubeconfig file");
  }
  ClientConfig config;
  config.host = service_host;
  const auto port = parse_int(service_port);
  if (!port || *port < 1 || *port > 65535) fail_user("KUBERNETES_SERVICE_PORT '" + service_port + "' is not a port");
  config.port = static_cast<int>(*port);
  config.ca_file = (root / "ca.crt").string();
  config.token_file = (root / "token").string();
  for (const std::string& file : {config.ca_file, config.token_file}) {
    if (!std::filesystem::exists(file)) fail_user(file + " is missing: the pod has no service account mounted");
  }
  const std::filesystem::path ns = root / "namespace";
  if (std::filesystem::exists(ns)) config.default_namespace = std::string(trim(read_file(ns)));
  return config;
}

ClientConfig parse_kubeconfig(std::string_view yaml, const std::filesystem::path& directory, std::string_view context) {
  try {
    return from_yaml(YAML::Load(std::string(yaml)), directory, context);
  } catch (const YAML::Exception& e) {
    fail_user(std::string("kubeconfig: ") + e.what());
  }
}

ClientConfig load_kubeconfig(const std::filesystem::path& path, std::string_view context) {
  try {
    return parse_kubeconfig(read_file(path), path.parent_path(), context);
  } catch (const Error& e) {
    throw Error(e.kind(), path.string() + ": " + e.what());
  }
}

std::optional<std::string> base64_decode(std::string_view text) {
  static const std::array<int8_t, 256> table = [] {
    std::array<int8_t, 256> t{};
    t.fill(-1);
    const std::string_view alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < alphabet.size(); ++i) t[static_cast<unsigned char>(alphabet[i])] = static_cast<int8_t>(i);
    return t;
  }();
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  int padding = 0;
  for (const unsigned char c : text) {
    if (c == '\n' || c == '\r' || c == ' ' || c == '\t') continue;
    if (c == '=') {
      ++padding;
      continue;
    }
    if (table[c] < 0 || padding > 0) return std::nullopt;
    bits = (bits << 6 | static_cast<uint32_t>(table[c])) & 0xffffff;
    if (++count % 4 == 0) {
      for (const int shift : {16, 8, 0}) out += static_cast<char>(bits >> shift & 0xff);
    }
  }
  const int rest = count % 4;
  if (rest == 1 || (rest == 0 ? padding != 0 : padding != 4 - rest)) return std::nullopt;
  if (rest == 2) out += static_cast<char>(bits >> 4 & 0xff);
  if (rest == 3) {
    out += static_cast<char>(bits >> 10 & 0xff);
    out += static_cast<char>(bits >> 2 & 0xff);
  }
  return out;
}

std::string base64_encode(std::string_view bytes) {
  static const char* const kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t n = std::min<size_t>(3, bytes.size() - i);
    uint32_t bits = 0;
    for (size_t j = 0; j < 3; ++j) bits = bits << 8 | (j < n ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    for (size_t j = 0; j < 4; ++j) out += j <= n ? kAlphabet[bits >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

}  // namespace trireme::kube
