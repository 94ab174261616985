#include "operator/kube/credentials.h"

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme::kube {

Credentials::Credentials(const ClientConfig& config, Milliseconds refresh)
    : config_(config), refresh_(refresh), checked_(SteadyClock::now()) {
  token_ = read_token();
  if (config_.scheme != "https") return;
  texts_ = read_texts();
  tls_ = build(texts_, 1);
}

Credentials::Texts Credentials::read_texts() const {
  const auto either = [](const std::string& text, const std::string& file) {
    return !text.empty() || file.empty() ? text : read_file(file);
  };
  return {either(config_.ca_pem, config_.ca_file), either(config_.client_cert_pem, config_.client_cert_file),
          either(config_.client_key_pem, config_.client_key_file)};
}

std::string Credentials::read_token() const {
  const std::string text = config_.token_file.empty() ? config_.token : read_file(config_.token_file);
  const std::string token(trim(text));
  if (token.find_first_of("\r\n") != std::string::npos) fail_user(config_.token_file + " holds more than one line");
  return token;
}

std::shared_ptr<const TlsMaterial> Credentials::build(const Texts& texts, uint64_t generation) const {
  auto material = std::make_shared<TlsMaterial>();
  material->generation = generation;
  if (texts.ca.empty()) fail_user("no CA certificate for " + config_.url());
  material->store = make_store(texts.ca, config_.ca_file.empty() ? "the CA of the configuration" : config_.ca_file);
  if (!texts.cert.empty()) material->identity = make_identity(texts.cert, texts.key, "client");
  return material;
}

bool Credentials::refresh_locked() {
  checked_ = SteadyClock::now();
  bool changed = false;
  // A file that is half written or gone for a moment must not take away what works.
  try {
    const std::string token = read_token();
    if (token != token_ && !token.empty()) {
      token_ = token;
      changed = true;
    }
    if (config_.scheme == "https") {
      const Texts texts = read_texts();
      if (!(texts == texts_)) {
        tls_ = build(texts, tls_->generation + 1);
        texts_ = texts;
        changed = true;
        log_info("kube", "TLS files of " + config_.url() + " were read again");
      }
    }
  } catch (const std::exception& e) {
    log_warn("kube", std::string("credentials could not be read again, the old ones stay: ") + e.what());
  }
  return changed;
}

std::string Credentials::token() {
  std::lock_guard lock(mutex_);
  if (SteadyClock::now() - checked_ >= refresh_) refresh_locked();
  return token_;
}

std::shared_ptr<const TlsMaterial> Credentials::tls() {
  std::lock_guard lock(mutex_);
  if (SteadyClock::now() - checked_ >= refresh_) refresh_locked();
  return tls_;
}

bool Credentials::refresh_now() {
  std::lock_guard lock(mutex_);
  return refresh_locked();
}

}  // namespace trireme::kube
