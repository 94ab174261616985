#include "operator/webhook/certificates.h"

#include <chrono>
#include <filesystem>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/api_error.h"

namespace trireme::webhook {
namespace {

using kube::ApiError;
using nlohmann::json;

constexpr const char* kCaCert = "ca.crt";
constexpr const char* kCaKey = "ca.key";
constexpr const char* kLeafCert = "tls.crt";
constexpr const char* kLeafKey = "tls.key";
constexpr int kMaxConflicts = 8;
constexpr int64_t kStartMargin = 300;  // for API servers whose clock is behind ours

int64_t system_now_s() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::optional<CertificateSet> read_secret(const json& secret) {
  const json data = secret.value("data", json::object());
  auto get = [&](const char* key) -> std::string {
    if (!data.is_object() || !data.contains(key) || !data[key].is_string()) return {};
    return kube::base64_decode(data[key].get<std::string>()).value_or("");
  };
  CertificateSet set{{get(kCaCert), get(kCaKey)}, {get(kLeafCert), get(kLeafKey)}};
  if (set.ca.cert_pem.empty() || set.ca.key_pem.empty() || set.leaf.cert_pem.empty() || set.leaf.key_pem.empty())
    return std::nullopt;
  return set;
}

json secret_data(const CertificateSet& set) {
  return {{kCaCert, kube::base64_encode(set.ca.cert_pem)},
          {kCaKey, kube::base64_encode(set.ca.key_pem)},
          {kLeafCert, kube::base64_encode(set.leaf.cert_pem)},
          {kLeafKey, kube::base64_encode(set.leaf.key_pem)}};
}

// "": there is none that can be read.
std::string first_certificate(const std::string& pem) {
  constexpr std::string_view kEnd = "-----END CERTIFICATE-----";
  const size_t end = pem.find(kEnd);
  if (end == std::string::npos) return {};
  const std::string first = pem.substr(0, end + kEnd.size()) + "\n";
  try {
    kube::certificate_dates(first);
    return first;
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

bool is_current(const CertificateSet& set, const std::vector<std::string>& dns_names, int64_t now_unix_s) {
  try {
    for (const std::string& name : dns_names) {
      if (!kube::certificate_matches(set.leaf, set.ca.cert_pem, name)) return false;
    }
    const kube::CertificateDates leaf = kube::certificate_dates(set.leaf.cert_pem);
    const kube::CertificateDates ca = kube::certificate_dates(set.ca.cert_pem);
    const int64_t life = leaf.not_after_unix_s - leaf.not_before_unix_s;
    return now_unix_s >= leaf.not_before_unix_s && leaf.not_after_unix_s - now_unix_s > life / 3 &&
           ca.not_after_unix_s >= leaf.not_after_unix_s;
  } catch (const Error&) {
    return false;
  }
}

CertificateSet renew(const std::optional<CertificateSet>& old, const CertificateOptions& options,
                     const std::vector<std::string>& dns_names, int64_t now_unix_s) {
  kube::LeafOptions leaf;
  leaf.common_name = dns_names.front();
  for (const std::string& name : dns_names) {
    leaf.dns_names.push_back(name);
    leaf.dns_names.push_back(name + ".cluster.local");
  }
  // Both count from the system's clock.
  leaf.start_offset_seconds = now_unix_s - system_now_s() - kStartMargin;
  leaf.valid_seconds = now_unix_s - system_now_s() + options.leaf_valid_seconds;
  if (old) {
    try {
      if (kube::certificate_dates(old->ca.cert_pem).not_after_unix_s > now_unix_s + options.leaf_valid_seconds) {
        CertificateSet set{old->ca, kube::issue_certificate(old->ca, leaf)};
        if (is_current(set, dns_names, now_unix_s)) return set;
      }
    } catch (const Error& e) {
      log_warn("webhook", std::string("the CA in the Secret is of no use (") + e.what() + "); a new one is made");
    }
  }
  const kube::KeyPair ca = kube::make_ca("trireme-webhook-ca", options.ca_valid_seconds);
  return {ca, kube::issue_certificate(ca, leaf)};
}

std::string bundle_for(const std::string& current, const std::string& ca_pem, bool settled) {
  if (current.empty()) return ca_pem;
  if (current.starts_with(ca_pem)) return settled ? ca_pem : current;
  if (current.find(ca_pem) != std::string::npos) return current;  // the first one is newer than what we have read
  const std::string old = first_certificate(current);
  return old.empty() ? ca_pem : ca_pem + (ca_pem.ends_with('\n') ? "" : "\n") + old;
}

CertificateKeeper::CertificateKeeper(const kube::Client& client, CertificateOptions options,
                                     std::function<void(const kube::KeyPair&)> on_change)
    : client_(client), options_(std::move(options)), on_change_(std::move(on_change)) {
  if (options_.cert_file.empty() != options_.key_file.empty())
    fail_user("the webhook needs both a certificate file and a key file");
}

CertificateKeeper::~CertificateKeeper() { stop(); }

void CertificateKeeper::start() {
  thread_ = std::thread([this] { run(); });
}

void CertificateKeeper::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void CertificateKeeper::run() {
  while (true) {
    Milliseconds wait = options_.cert_file.empty() ? options_.check_interval : options_.file_interval;
    try {
      ensure();
    } catch (const std::exception& e) {
      log_warn("webhook", std::string("certificate: ") + e.what() + "; will try again");
      wait = options_.retry;
    }
    std::unique_lock lock(mutex_);
    if (wake_.wait_for(lock, wait, [&] { return stopping_; })) return;
  }
}

void CertificateKeeper::ensure() {
  if (options_.cert_file.empty()) {
    ensure_own();
  } else {
    ensure_files();
  }
  std::lock_guard lock(mutex_);
  ready_ = true;
}

void CertificateKeeper::ensure_files() {
  const bool has_ca = !options_.ca_file.empty() && std::filesystem::exists(options_.ca_file);
  hand_over({read_file(options_.cert_file), read_file(options_.key_file)}, has_ca ? read_file(options_.ca_file) : "");
}

void CertificateKeeper::ensure_own() {
  const CertificateSet set = read_or_make();
  hand_over(set.leaf, set.ca.cert_pem);
  const std::string& ca = set.ca.cert_pem;
  const bool settled = told_ca_ == ca;
  patch_configuration(kube::resources::kValidatingWebhooks, options_.validating_configuration, ca, settled);
  patch_configuration(kube::resources::kMutatingWebhooks, options_.mutating_configuration, ca, settled);
  told_ca_ = ca;
}

CertificateSet CertificateKeeper::read_or_make() {
  const kube::ObjectKey key{options_.ns, options_.secret_name};
  for (int i = 0; i < kMaxConflicts; ++i) {
    std::optional<json> secret = client_.find(kube::resources::kSecrets, key, deadline());
    const std::optional<CertificateSet> old = secret ? read_secret(*secret) : std::nullopt;
    if (old && is_current(*old, dns_names(), now())) return *old;
    const CertificateSet fresh = renew(old, options_, dns_names(), now());
    try {
      if (secret) {
        (*secret)["data"] = secret_data(fresh);
        client_.update(kube::resources::kSecrets, *secret, {}, deadline());
      } else {
        client_.create(kube::resources::kSecrets,
                       {{"apiVersion", "v1"},
                        {"kind", "Secret"},
                        {"type", "kubernetes.io/tls"},
                        {"metadata",
                         {{"name", key.name},
                          {"namespace", key.ns},
                          {"labels", {{"app.kubernetes.io/managed-by", "trireme-operator"}}}}},
                        {"data", secret_data(fresh)}},
                       deadline());
      }
      log_info("webhook", "made a new certificate for " + join(dns_names(), " and "));
      return fresh;
    } catch (const ApiError& e) {
      if (!e.conflict() && !e.already_exists() && !e.not_found())
        throw;  // else another replica was first: take its pair
    }
  }
  throw Error(ErrorKind::kConflict, "Secret " + key.str() + " keeps changing under us");
}

void CertificateKeeper::patch_configuration(const kube::Resource& resource, const std::string& name,
                                            const std::string& ca_pem, bool settled) {
  if (name.empty()) return;
  for (int i = 0; i < kMaxConflicts; ++i) {
    std::optional<json> found = client_.find(resource, {"", name}, deadline());
    if (!found) throw Error(ErrorKind::kNotFound, resource.kind + " " + name + " is not there");
    bool changed = false;
    if (found->contains("webhooks") && (*found)["webhooks"].is_array()) {
      for (json& hook : (*found)["webhooks"]) {
        if (!hook.is_object() || !hook.contains("clientConfig")) continue;
        json& config = hook["clientConfig"];
        const std::string before = config.value("caBundle", std::string());
        const std::string bundle =
            kube::base64_encode(bundle_for(kube::base64_decode(before).value_or(""), ca_pem, settled));
        if (before == bundle) continue;
        config["caBundle"] = bundle;
        changed = true;
      }
    }
    if (!changed) return;
    try {
      client_.update(resource, *found, {}, deadline());
      return;
    } catch (const ApiError& e) {
      if (!e.conflict()) throw;
    }
  }
  throw Error(ErrorKind::kConflict, resource.kind + " " + name + " keeps changing under us");
}

void CertificateKeeper::hand_over(const kube::KeyPair& pair, const std::string& ca_pem) {
  {
    std::lock_guard lock(mutex_);
    ca_pem_ = ca_pem;
    if (handed_over_ == pair.cert_pem) return;
  }
  const int64_t expires = kube::certificate_dates(pair.cert_pem).not_after_unix_s;
  on_change_(pair);
  std::lock_guard lock(mutex_);
  handed_over_ = pair.cert_pem;
  expires_ = expires;
}

bool CertificateKeeper::handed_over() const {
  std::lock_guard lock(mutex_);
  return !handed_over_.empty();
}

std::string CertificateKeeper::ca_pem() const {
  std::lock_guard lock(mutex_);
  return ca_pem_;
}

std::vector<std::string> CertificateKeeper::dns_names() const {
  std::vector<std::string> names;
  for (const std::string& service : {options_.service_name, options_.status_service_name}) {
    if (!service.empty()) names.push_back(service + "." + options_.ns + ".svc");
  }
  return names;
}

bool CertificateKeeper::ready() const {
  std::lock_guard lock(mutex_);
  return ready_;
}

int64_t CertificateKeeper::expires_unix_s() const {
  std::lock_guard lock(mutex_);
  return expires_;
}

int64_t CertificateKeeper::now() const { return options_.now_unix_s ? options_.now_unix_s() : system_now_s(); }

}  // namespace trireme::webhook
