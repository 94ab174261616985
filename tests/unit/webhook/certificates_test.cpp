#include "operator/webhook/certificates.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include "base/error.h"
#include "base/fs.h"
#include "operator/webhook/webhook_server.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::webhook {
namespace {

using kube::testing::eventually;
using kube::testing::FakeApiServer;
using nlohmann::json;
namespace resources = kube::resources;

struct Place {
  FakeApiServer server;
  kube::Client client{server.config()};
  CertificateOptions options;
  std::vector<kube::KeyPair> handed;
  std::mutex mutex;

  Place() {
    for (const auto& resource : {resources::kValidatingWebhooks, resources::kMutatingWebhooks}) {
      const bool validating = resource.plural == resources::kValidatingWebhooks.plural;
      server.put(resource, {{"metadata", {{"name", validating ? "trireme-validating" : "trireme-mutating"}}},
                            {"webhooks", json::array({{{"name", "a"}, {"clientConfig", {{"service", {{"name", "x"}}}}}},
                                                      {{"name", "b"}, {"clientConfig", json::object()}}})}});
    }
  }
  std::unique_ptr<CertificateKeeper> keeper() {
    return std::make_unique<CertificateKeeper>(client, options, [this](const kube::KeyPair& pair) {
      std::lock_guard lock(mutex);
      handed.push_back(pair);
    });
  }
  json secret() const { return server.get(resources::kSecrets, {options.ns, options.secret_name}).value_or(json()); }
  std::string bundle(const kube::Resource& resource, const char* name, int hook) const {
    return (*server.get(resource, {"", name}))["webhooks"][hook]["clientConfig"].value("caBundle", "");
  }
};

TEST(Certificates, MadeStoredAndMadeKnown) {
  Place p;
  auto keeper = p.keeper();
  EXPECT_FALSE(keeper->ready());
  keeper->ensure();
  EXPECT_TRUE(keeper->ready());
  ASSERT_EQ(p.handed.size(), 1u);
  const std::string ca = p.secret()["data"]["ca.crt"];
  for (int hook : {0, 1}) {
    EXPECT_EQ(p.bundle(resources::kValidatingWebhooks, "trireme-validating", hook), ca);
    EXPECT_EQ(p.bundle(resources::kMutatingWebhooks, "trireme-mutating", hook), ca);
  }
  EXPECT_TRUE(kube::certificate_matches(p.handed[0], *kube::base64_decode(ca), keeper->dns_names().front()));
  // Nothing changes without need, and another replica takes the same pair.
  const int64_t version = p.server.resource_version();
  keeper->ensure();
  p.keeper()->ensure();
  EXPECT_EQ(p.server.resource_version(), version);
  ASSERT_EQ(p.handed.size(), 2u);
  EXPECT_EQ(p.handed[1].cert_pem, p.handed[0].cert_pem);
}

TEST(Certificates, NamesTheStatusServiceToo) {
  Place p;
  p.keeper()->ensure();
  const std::string ca = p.secret()["data"]["ca.crt"];
  p.options.status_service_name = "trireme-status";  // as after an upgrade
  auto keeper = p.keeper();
  EXPECT_EQ(keeper->ca_pem(), "");
  EXPECT_FALSE(keeper->handed_over());
  keeper->ensure();
  EXPECT_TRUE(keeper->handed_over());
  EXPECT_EQ(p.secret()["data"]["ca.crt"], ca) << "the CA stays";
  EXPECT_EQ(kube::base64_encode(keeper->ca_pem()), ca);
  for (const char* name : {"trireme-webhook.trireme-system.svc", "trireme-status.trireme-system.svc"}) {
    EXPECT_TRUE(kube::certificate_matches(p.handed.back(), keeper->ca_pem(), name)) << name;
  }
}

TEST(Certificates, RenewedInTimeUnderTheSameCa) {
  Place p;
  const int64_t start = kube::unix_now_ms() / 1000;
  int64_t now = start;
  p.options.now_unix_s = [&] { return now; };
  p.options.leaf_valid_seconds = 3000;
  auto keeper = p.keeper();
  keeper->ensure();
  const std::string ca = p.secret()["data"]["ca.crt"];
  now = start + 1000;
  keeper->ensure();
  EXPECT_EQ(p.handed.size(), 1u) << "more than a third of its life is left";
  now = start + 2500;
  keeper->ensure();
  ASSERT_EQ(p.handed.size(), 2u);
  EXPECT_NE(p.handed[0].cert_pem, p.handed[1].cert_pem);
  EXPECT_EQ(p.secret()["data"]["ca.crt"], ca) << "the API server need not learn a new authority";
  EXPECT_GT(keeper->expires_unix_s(), start + 5000);
}

TEST(Certificates, BrokenSecretIsReplaced) {
  Place p;
  p.server.put(resources::kSecrets,
               {{"metadata", {{"name", p.options.secret_name}, {"namespace", p.options.ns}}},
                {"data", {{"ca.crt", "AAAA"}, {"ca.key", "AAAA"}, {"tls.crt", "!!"}, {"tls.key", 7}}}});
  auto keeper = p.keeper();
  keeper->ensure();
  EXPECT_EQ(p.handed.size(), 1u);
  EXPECT_TRUE(keeper->ready());
}

TEST(Certificates, SecondReplicaTakesTheFirstOnesPair) {
  Place p;
  // Both find no Secret; ours is created while the other one's request is on its way.
  p.server.inject(
      {.method = "POST", .path_part = "/secrets", .status = 409, .reason = "AlreadyExists", .apply_first = true});
  auto keeper = p.keeper();
  keeper->ensure();
  ASSERT_EQ(p.handed.size(), 1u);
  const json secret = p.secret();
  EXPECT_EQ(kube::base64_encode(p.handed[0].cert_pem), secret["data"]["tls.crt"].get<std::string>());
}

TEST(Certificates, EmptiedBundleIsPutBack) {
  Place p;
  auto keeper = p.keeper();
  keeper->ensure();
  const std::string before = p.bundle(resources::kValidatingWebhooks, "trireme-validating", 0);
  p.server.modify(resources::kValidatingWebhooks, {"", "trireme-validating"},
                  [](json& c) { c["webhooks"][0]["clientConfig"].erase("caBundle"); });
  keeper->ensure();
  EXPECT_EQ(p.bundle(resources::kValidatingWebhooks, "trireme-validating", 0), before);
}

// The Secret is lost: one replica makes a new authority while the other one serves a certificate of the old.
TEST(Certificates, BothAuthoritiesAreKnownUntilEveryReplicaHasLooked) {
  Place p;
  auto a = p.keeper(), b = p.keeper();
  a->ensure();
  b->ensure();
  const kube::KeyPair old_leaf = p.handed.back();
  const auto known = [&] {
    const std::string bundle = p.bundle(resources::kValidatingWebhooks, "trireme-validating", 0);
    EXPECT_EQ(p.bundle(resources::kMutatingWebhooks, "trireme-mutating", 1), bundle);
    return kube::base64_decode(bundle).value_or("");
  };
  const std::string old_ca = known();
  p.server.erase(resources::kSecrets, {p.options.ns, p.options.secret_name});
  a->ensure();
  const kube::KeyPair new_leaf = p.handed.back();
  ASSERT_NE(new_leaf.cert_pem, old_leaf.cert_pem);
  const std::string new_ca = a->ca_pem();
  EXPECT_EQ(known(), new_ca + old_ca);
  for (const auto& leaf : {old_leaf, new_leaf})
    EXPECT_TRUE(kube::certificate_matches(leaf, known(), a->dns_names().front())) << "either replica may be asked";
  b->ensure();  // its first look since
  EXPECT_EQ(p.handed.back().cert_pem, new_leaf.cert_pem);
  p.keeper()->ensure();  // nor does one that has just begun know what the others serve
  EXPECT_EQ(known(), new_ca + old_ca);
  a->ensure();
  EXPECT_EQ(known(), new_ca) << "an interval later all serve the new one";
}

TEST(Certificates, ABrokenRoundKeepsTheOldAuthority) {
  Place p;
  auto keeper = p.keeper();
  keeper->ensure();
  const std::string old_ca = keeper->ca_pem();
  const json mutating = *p.server.get(resources::kMutatingWebhooks, {"", "trireme-mutating"});
  p.server.erase(resources::kSecrets, {p.options.ns, p.options.secret_name});
  p.server.erase(resources::kMutatingWebhooks, {"", "trireme-mutating"});
  EXPECT_THROW(keeper->ensure(), Error);
  p.server.put(resources::kMutatingWebhooks, mutating);
  keeper->ensure();  // seconds later
  for (const auto& [resource, name] : {std::pair{resources::kValidatingWebhooks, "trireme-validating"},
                                       {resources::kMutatingWebhooks, "trireme-mutating"}})
    EXPECT_EQ(p.bundle(resource, name, 0), kube::base64_encode(keeper->ca_pem() + old_ca)) << name;
}

TEST(Certificates, OneOldAuthorityAtMostStaysInABundle) {
  const std::string a = kube::make_ca("a").cert_pem, b = kube::make_ca("b").cert_pem, c = kube::make_ca("c").cert_pem;
  EXPECT_EQ(bundle_for("", a, false), a);
  EXPECT_EQ(bundle_for(a, a, false), a);
  EXPECT_EQ(bundle_for(a, b, true), b + a);
  EXPECT_EQ(bundle_for(b + a, c, true), c + b);
  EXPECT_EQ(bundle_for(b + a, a, true), b + a) << "another replica has made b since we read";
  EXPECT_EQ(bundle_for("no certificate", b, false), b) << "what cannot be read is not kept";
  EXPECT_EQ(bundle_for("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b, false), b);
}

TEST(Certificates, MissingConfigurationIsNotReady) {
  Place p;
  p.server.erase(resources::kMutatingWebhooks, {"", "trireme-mutating"});
  auto keeper = p.keeper();
  EXPECT_THROW(keeper->ensure(), Error);
  EXPECT_FALSE(keeper->ready());
}

TEST(Certificates, FilesAreReadAgain) {
  Place p;
  TemporaryDirectory dir;
  const kube::KeyPair ca = kube::make_ca("ca");
  auto write = [&] {
    kube::LeafOptions leaf;
    leaf.common_name = "w";
    leaf.dns_names = {"w"};
    const kube::KeyPair pair = kube::issue_certificate(ca, leaf);
    write_file_atomic(dir.path() / "tls.crt", pair.cert_pem);
    write_file_atomic(dir.path() / "tls.key", pair.key_pem);
  };
  write();
  p.options.cert_file = dir.path() / "tls.crt";
  p.options.key_file = dir.path() / "tls.key";
  p.options.ca_file = dir.path() / "ca.crt";
  p.options.file_interval = Milliseconds(10);
  auto keeper = p.keeper();
  keeper->start();
  auto count = [&] {
    std::lock_guard lock(p.mutex);
    return p.handed.size();
  };
  ASSERT_TRUE(eventually([&] { return count() == 1; }));
  EXPECT_EQ(keeper->ca_pem(), "") << "an issuer may have none";
  write_file_atomic(dir.path() / "ca.crt", ca.cert_pem);
  write();
  EXPECT_TRUE(eventually([&] { return count() == 2; }));
  EXPECT_EQ(keeper->ca_pem(), ca.cert_pem);
  keeper->stop();
  EXPECT_EQ(p.server.count("GET", "/secrets"), 0);
}

TEST(WebhookServer, AnswersOverTlsAndSwapsCertificates) {
  const kube::KeyPair ca = kube::make_ca("ca");
  TemporaryDirectory dir;
  write_file_atomic(dir.path() / "ca.crt", ca.cert_pem);
  kube::LeafOptions leaf;
  leaf.common_name = "localhost";
  leaf.dns_names = {"localhost"};
  leaf.ip_addresses = {"127.0.0.1"};
  WebhookServer server({.address = "127.0.0.1"});
  server.set_certificate(kube::issue_certificate(ca, leaf));
  server.set_certificate(kube::issue_certificate(ca, leaf));
  auto post = [&](const std::string& path, const std::string& body) {
    httplib::SSLClient client("127.0.0.1", server.port());
    client.set_ca_cert_path((dir.path() / "ca.crt").c_str());
    client.set_read_timeout(60, 0);
    const auto result = client.Post(path.c_str(), body, "application/json");
    return result ? result->status : -1;
  };
  const std::string review =
      R"({"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview",)"
      R"("request":{"uid":"u","operation":"DELETE","kind":{"group":"trireme.dev","kind":"RLJob"}}})";
  EXPECT_EQ(post("/validate", review), 200);
  EXPECT_EQ(post("/default", review), 200);
  EXPECT_EQ(post("/validate", "{"), 400);
  EXPECT_EQ(post("/nothing", review), 404);
}

}  // namespace
}  // namespace trireme::webhook
