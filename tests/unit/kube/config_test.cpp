#include "operator/kube/client_config.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/fs.h"
#include "operator/kube/certificates.h"
#include "operator/kube/events.h"
#include "operator/kube/resource.h"
#include "tests/unit/errors.h"

namespace trireme::kube {
namespace {

using test::user_error_of;

constexpr const char* kConfig = R"(
apiVersion: v1
kind: Config
current-context: main
clusters:
- name: c
  cluster: {server: "https://10.0.0.1:6443/prefix/", certificate-authority-data: Q0EK, tls-server-name: api}
- name: open
  cluster: {server: "https://x", insecure-skip-tls-verify: true}
contexts:
- name: main
  context: {cluster: c, user: u, namespace: team}
- name: plugin
  context: {cluster: c, user: exec}
- name: open
  context: {cluster: open, user: u}
- name: lost
  context: {cluster: nowhere, user: u}
users:
- name: u
  user: {client-certificate: pki/me.crt, client-key: /abs/me.key}
- name: exec
  user: {exec: {command: aws}}
)";

TEST(Kubeconfig, ReadsTheSubset) {
  const ClientConfig c = parse_kubeconfig(kConfig, "/home/me/.kube");
  EXPECT_EQ(c.url(), "https://10.0.0.1:6443/prefix");
  EXPECT_EQ(c.ca_pem, "CA\n");
  EXPECT_EQ(c.server_name, "api");
  EXPECT_EQ(c.client_cert_file, "/home/me/.kube/pki/me.crt");
  EXPECT_EQ(c.client_key_file, "/abs/me.key");
  EXPECT_EQ(c.default_namespace, "team");
}

TEST(Kubeconfig, RefusesWithTheKeysName) {
  const auto refused = [](const std::string& text, const std::string& context, const std::string& part) {
    const std::string message = user_error_of([&] { parse_kubeconfig(text, "/", context); });
    EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  refused(kConfig, "plugin", "exec of user 'exec' is not supported");
  refused(kConfig, "open", "insecure-skip-tls-verify");
  refused(kConfig, "lost", "'nowhere'");
  refused(kConfig, "missing", "'missing'");
  refused("", "", "not a YAML map");
  refused("[1, 2]", "", "not a YAML map");
  refused("a: {", "", "kubeconfig");
  refused("current-context: x", "", "contexts is missing");
  refused("current-context: x\ncontexts: [7]", "", "not a map");
  refused("current-context: x\ncontexts: [{name: x, context: 3}]", "", "not a map");
  refused("current-context: [a]", "", "not text");
  refused(
      "current-context: x\ncontexts: [{name: x, context: {cluster: c}}]\nclusters: [{name: c, cluster: {server: "
      "'https://h'}}]",
      "", "certificate-authority");
  refused(
      "current-context: x\ncontexts: [{name: x, context: {cluster: c}}]\n"
      "clusters: [{name: c, cluster: {server: 'https://h', certificate-authority-data: '!!!'}}]",
      "", "not base64");
  EXPECT_THROW(load_kubeconfig("/"), Error);
  EXPECT_THROW(load_kubeconfig("/no/such/file"), Error);
}

TEST(ServerUrl, Forms) {
  const auto url = [](const std::string& text) {
    ClientConfig c;
    set_server_url(c, text);
    return c.url() + " " + c.host;
  };
  EXPECT_EQ(url("https://h"), "https://h:443 h");
  EXPECT_EQ(url("HTTP://h:8001/"), "http://h:8001 h");
  EXPECT_EQ(url("https://[fd00::1]:6443/a/b"), "https://[fd00::1]:6443/a/b fd00::1");
  for (const char* bad : {"", "h:6443", "ftp://h", "https://", "https://h:0", "https://h:99999", "https://h:x",
                          "https://a:b:c", "https://[::1", "https://u@h", "https://h?x", "https://h /"}) {
    EXPECT_NE(user_error_of([&] { url(bad); }), "") << bad;
  }
}

TEST(InCluster, ReadsTheServiceAccount) {
  TemporaryDirectory folder;
  EXPECT_NE(user_error_of([&] { in_cluster_config("", "", folder.path()); }).find("KUBERNETES_SERVICE_HOST"),
            std::string::npos);
  EXPECT_NE(user_error_of([&] { in_cluster_config("10.0.0.1", "443", folder.path()); }).find("ca.crt is missing"),
            std::string::npos);
  for (const char* name : {"ca.crt", "token"}) write_file_atomic(folder.path() / name, "x");
  write_file_atomic(folder.path() / "namespace", "trireme-system\n");
  const ClientConfig c = in_cluster_config("fd00::1", "443", folder.path());
  EXPECT_EQ(c.url(), "https://[fd00::1]:443");
  EXPECT_EQ(c.default_namespace, "trireme-system");
}

TEST(Base64, RoundTripAndRefusal) {
  for (const std::string& text : std::vector<std::string>{"", "a", "ab", "abc", "abcd", {"\0\xff\x80z", 4}})
    EXPECT_EQ(base64_decode(base64_encode(text)), text);
  std::string all;
  for (int i = 0; i < 256; ++i) all += static_cast<char>(i);
  EXPECT_EQ(base64_decode(base64_encode(all)), all);
  EXPECT_EQ(base64_decode("YW Jj\nZA==\n"), "abcd");
  for (const char* bad : {"a", "ab", "abc", "ab=", "a===", "abc=d", "====", "ab!d", "abcd="})
    EXPECT_EQ(base64_decode(bad), std::nullopt) << bad;
}

TEST(ResourcePath, EncodesAndNeedsNamespaces) {
  EXPECT_EQ(resources::kPods.path("ns", "a b/c", "log"), "/api/v1/namespaces/ns/pods/a%20b%2Fc/log");
  EXPECT_EQ(resources::kPods.path(""), "/api/v1/pods");
  EXPECT_EQ(resources::kRlJobs.path("n", "j", "status"), "/apis/trireme.dev/v1alpha1/namespaces/n/rljobs/j/status");
  EXPECT_EQ(resources::kNodes.path("ignored", "n1"), "/api/v1/nodes/n1");
  EXPECT_THROW(resources::kPods.path("", "name"), Error);
  EXPECT_EQ(ObjectKey::parse("a/b").str(), "a/b");
  EXPECT_EQ(ObjectKey::parse("b"), (ObjectKey{"", "b"}));
}

TEST(Time, FormatsAndParses) {
  EXPECT_EQ(format_time(0), "1970-01-01T00:00:00Z");
  EXPECT_EQ(format_micro_time(1767323045123456), "2026-01-02T03:04:05.123456Z");
  EXPECT_EQ(parse_time("2026-01-02T03:04:05Z"), 1767323045000);
  EXPECT_EQ(parse_time("2026-01-02T03:04:05.123456Z"), 1767323045123);
  EXPECT_EQ(parse_time("2026-01-02T05:04:05.5+02:00"), 1767323045500);
  for (const char* bad : {"", "2026-01-02", "2026-13-02T03:04:05Z", "2026-01-02T03:04:05", "2026-01-02T03:04:05.Z",
                          "2026-01-02 03:04:05Z", "x026-01-02T03:04:05Z", "2026-01-02T03:04:05Zz"}) {
    EXPECT_EQ(parse_time(bad), std::nullopt) << bad;
  }
}

TEST(Certificates, CaSignsLeaf) {
  const KeyPair ca = make_ca("test CA");
  LeafOptions options;
  options.common_name = "svc";
  options.dns_names = {"svc.ns.svc", "svc"};
  options.ip_addresses = {"127.0.0.1", "::1"};
  options.valid_seconds = 3600;
  const KeyPair leaf = issue_certificate(ca, options);
  EXPECT_TRUE(certificate_matches(leaf, ca.cert_pem, "svc.ns.svc"));
  EXPECT_FALSE(certificate_matches(leaf, ca.cert_pem, "other"));
  EXPECT_FALSE(certificate_matches(leaf, make_ca("other").cert_pem, "svc"));
  EXPECT_FALSE(certificate_matches({leaf.cert_pem, ca.key_pem}, ca.cert_pem, "svc"));
  EXPECT_FALSE(certificate_matches({"junk", "junk"}, ca.cert_pem, "svc"));
  const CertificateDates dates = certificate_dates(leaf.cert_pem);
  EXPECT_EQ(dates.not_after_unix_s - dates.not_before_unix_s, 3900);
  options.ip_addresses = {"not-an-address"};
  EXPECT_THROW(issue_certificate(ca, options), Error);
}

}  // namespace
}  // namespace trireme::kube
