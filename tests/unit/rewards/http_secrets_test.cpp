// HTTP rewards behind a token and a certificate: what is sent, and where it does not appear.
#include <gtest/gtest.h>
#include <httplib.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <mutex>
#include <thread>

#include "base/fs.h"
#include "tests/unit/errors.h"
#include "trainer/rewards/http_headers.h"
#include "trainer/rewards/reward.h"

namespace trireme {
namespace {

using test::error_of;

Deadline long_deadline() { return Deadline::after(Milliseconds(120000)); }

TEST(HttpHeaders, SecretsComeFromTheEnvironmentAndFromFiles) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "token").string();
  write_file_atomic(file, "first\n");
  const std::vector<std::string> lines = {"Authorization: Bearer {file:" + file + "}", "X-Key:{env:KEY}-{env:KEY}",
                                          "X-Team: rl {x}"};
  EXPECT_EQ(environment_of_headers(lines), (std::vector<std::string>{"KEY", "KEY"}));
  HttpHeaders headers(lines, {{"KEY", "k1234"}});
  using Values = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(headers.values(),
            (Values{{"Authorization", "Bearer first"}, {"X-Key", "k1234-k1234"}, {"X-Team", "rl {x}"}}));
  EXPECT_EQ(headers.redact("you sent Bearer first and k1234"), "you sent Bearer *** and ***");
  write_file_atomic(file, "second");  // renewed
  EXPECT_EQ(headers.values().front().second, "Bearer second");
  EXPECT_EQ(headers.redact("second"), "***");
}

TEST(HttpHeaders, MistakesAreNamedWithoutTheValue) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "token").string();
  const auto made = [](const std::string& line) { return error_of([&] { HttpHeaders({line}, {{"TWO", "a\nb"}}); }); };
  EXPECT_NE(made("X: {env:NOT_SET}").find("header X: the environment variable NOT_SET is not set"), std::string::npos);
  EXPECT_NE(made("X: {env:TWO}").find("control characters"), std::string::npos);
  EXPECT_NE(made("X: {env:").find("needs a name"), std::string::npos);
  EXPECT_NE(made("X: {file:}").find("needs a name"), std::string::npos);
  EXPECT_EQ(made("hunter2").find("hunter2"), std::string::npos);
  EXPECT_NE(made("hunter2").find("Name: value"), std::string::npos);
  HttpHeaders headers({"X: {file:" + file + "}"}, {});
  EXPECT_NE(error_of([&] { headers.values(); }).find("header X: cannot read " + file), std::string::npos);
  write_file_atomic(file, "\n");
  EXPECT_NE(error_of([&] { headers.values(); }).find("is empty"), std::string::npos);
  write_file_atomic(file, "hunter2\nEvil: header");
  const std::string error = error_of([&] { headers.values(); });
  EXPECT_NE(error.find("more than one line"), std::string::npos) << error;
  EXPECT_EQ(error.find("hunter2"), std::string::npos) << error;
  write_file_atomic(file, std::string(70000, 'x'));
  EXPECT_NE(error_of([&] { headers.values(); }).find("longer than 64 KiB"), std::string::npos);
}

// A service that wants a token and repeats what it was sent when it is another.
template <class Server>
class Guarded final {
 public:
  template <class... Arguments>
  explicit Guarded(const Arguments&... arguments) : server_(arguments...) {
    server_.Post("/score", [](const httplib::Request& request, httplib::Response& response) {
      const std::string sent = request.get_header_value("Authorization");
      if (sent == "Bearer right-token") {
        response.set_content("{\"rewards\": [0.5]}", "application/json");
      } else {
        response.set_content("no: " + sent, "text/plain");
      }
    });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(Milliseconds(1));
  }
  ~Guarded() {
    server_.stop();
    thread_.join();
  }
  RewardOptions options(const std::string& scheme) const {
    RewardOptions options{.type = "http"};
    options.url = scheme + "://127.0.0.1:" + std::to_string(port_) + "/score";
    options.max_attempts = 1;
    return options;
  }

 private:
  Server server_;
  int port_ = 0;
  std::thread thread_;
};

RewardResult score(const RewardOptions& options) {
  return make_reward(options)->score({{.prompt = "p", .response = "r", .gold = "7"}}, long_deadline()).at(0);
}

TEST(HttpReward, SendsItsTokenAndShowsItNowhere) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "token").string();
  const Guarded<httplib::Server> service;
  RewardOptions options = service.options("http");
  options.headers = {"Authorization: Bearer {file:" + file + "}"};
  const RewardResult missing = score(options);
  EXPECT_NE(missing.error.find("cannot read " + file), std::string::npos) << missing.error;
  EXPECT_FALSE(missing.hopeless);
  write_file_atomic(file, "right-token\n");
  EXPECT_EQ(score(options).reward, 0.5);
  write_file_atomic(file, "wrong-token\n");
  const RewardResult wrong = score(options);
  EXPECT_TRUE(wrong.failed && wrong.hopeless);
  EXPECT_NE(wrong.error.find("answered 'no: Bearer ***'"), std::string::npos) << wrong.error;
  options.url += "?key=hunter2";
  EXPECT_EQ(score(options).error.find("hunter2"), std::string::npos);
  options.url = "http://me:hunter2@127.0.0.1/score";
  const std::string refused = error_of([&] { make_reward(options); });
  EXPECT_NE(refused.find("must not hold a user or password"), std::string::npos) << refused;
  EXPECT_EQ(refused.find("hunter2"), std::string::npos) << refused;
}

// A certificate for 127.0.0.1 that has signed itself, and its key.
void write_certificate(const std::filesystem::path& certificate, const std::filesystem::path& key) {
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> pair(EVP_EC_gen("P-256"), EVP_PKEY_free);
  const std::unique_ptr<X509, decltype(&X509_free)> x509(X509_new(), X509_free);
  X509_set_version(x509.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(x509.get()), 1);
  X509_gmtime_adj(X509_getm_notBefore(x509.get()), -3600);
  X509_gmtime_adj(X509_getm_notAfter(x509.get()), 24 * 3600);
  X509_set_pubkey(x509.get(), pair.get());
  X509_NAME* name = X509_get_subject_name(x509.get());
  X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("rewards"), -1, -1, 0);
  X509_set_issuer_name(x509.get(), name);
  X509_EXTENSION* names = X509V3_EXT_conf_nid(nullptr, nullptr, NID_subject_alt_name, "IP:127.0.0.1");
  X509_add_ext(x509.get(), names, -1);
  X509_EXTENSION_free(names);
  ASSERT_GT(X509_sign(x509.get(), pair.get(), EVP_sha256()), 0);
  std::FILE* file = std::fopen(certificate.c_str(), "w");
  PEM_write_X509(file, x509.get());
  std::fclose(file);
  file = std::fopen(key.c_str(), "w");
  PEM_write_PrivateKey(file, pair.get(), nullptr, nullptr, 0, nullptr, nullptr);
  std::fclose(file);
}

TEST(HttpReward, TrustsTheGivenAuthorityAndNoOther) {
  const TemporaryDirectory dir;
  const std::string certificate = (dir.path() / "ca.pem").string(), key = (dir.path() / "key.pem").string();
  const std::string other = (dir.path() / "other.pem").string();
  write_certificate(certificate, key);
  write_certificate(other, (dir.path() / "other.key").string());
  const char *certificate_path = certificate.c_str(), *key_path = key.c_str();
  const Guarded<httplib::SSLServer> service(certificate_path, key_path);
  RewardOptions options = service.options("https");
  options.headers = {"Authorization: Bearer {env:TOKEN}"};
  options.environment = {{"TOKEN", "right-token"}};
  options.ca_file = certificate;
  const RewardResult trusted = score(options);
  EXPECT_EQ(trusted.reward, 0.5) << trusted.error;
  for (const std::string& ca : {std::string(), other}) {
    options.ca_file = ca;
    const RewardResult refused = score(options);
    EXPECT_TRUE(refused.failed && refused.hopeless) << ca;
  }
  options.ca_file = (dir.path() / "missing.pem").string();
  EXPECT_NE(error_of([&] { make_reward(options); }).find("missing.pem"), std::string::npos);
}

}  // namespace
}  // namespace trireme
