// What hostile peers can do to an HttpServer, and what they cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "operator/kube/client.h"
#include "operator/kube/http_server.h"
#include "tests/unit/kube/fake_types.h"
#include "tests/unit/kube/raw_peer.h"

namespace trireme::kube {
namespace {

using testing::eventually;
using testing::RawPeer;

HttpServerOptions local() {
  HttpServerOptions options;
  options.address = "127.0.0.1";
  options.max_body_bytes = 64u << 10;
  options.max_threads = 2;
  return options;
}

void answer_size(HttpServer& server) {
  server.handle("POST", "/", [](const HttpRequest& r) { return HttpResponse{200, std::to_string(r.body.size())}; });
}

std::string post(const std::string& body, const std::string& headers = "") {
  return "POST / HTTP/1.1\r\nHost: x\r\n" + headers + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
         body;
}

size_t resident_bytes() {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(Gate, AChunkedBodyIsRefusedBeforeItIsRead) {
  HttpServer server(local());
  answer_size(server);
  server.start();
  const size_t before = resident_bytes();
  RawPeer peer(server.port());
  ASSERT_TRUE(peer.connected());
  peer.send("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  const std::string chunk = "10000\r\n" + std::string(65536, 'x') + "\r\n";
  size_t sent = 0;
  for (int i = 0; i < 1600; ++i) {  // 100 MiB, if anybody takes them
    const size_t now = peer.send(chunk, Milliseconds(2000));
    sent += now;
    if (now < chunk.size()) break;
  }
  EXPECT_LT(sent, 32u << 20) << "the connection is closed after what systems hold on the way";
  EXPECT_LT(resident_bytes(), before + (16u << 20));
  RawPeer polite(server.port());
  polite.send("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  EXPECT_EQ(RawPeer::status_of(polite.receive()), 411);
}

TEST(Gate, RefusalsAreReadByTheirPeers) {
  HttpServer server(local());
  answer_size(server);
  server.start();
  const std::string big(1u << 20, 'x');
  RawPeer too_long(server.port());
  too_long.send(post(big), Milliseconds(5000));
  EXPECT_EQ(RawPeer::status_of(too_long.receive()), 413);
  RawPeer compressed(server.port());
  compressed.send(post("abc", "Content-Encoding: gzip\r\n"));
  EXPECT_EQ(RawPeer::status_of(compressed.receive()), 415);
  RawPeer headers(server.port());
  headers.send("GET / HTTP/1.1\r\nX: " + std::string(100000, 'x'), Milliseconds(5000));
  EXPECT_EQ(RawPeer::status_of(headers.receive()), 431);
  RawPeer junk(server.port());
  junk.send(std::string("\x16\x03\x01\x02\x00 junk\r\n\r\n", 15));
  EXPECT_EQ(RawPeer::status_of(junk.receive()), 400);
}

TEST(Gate, KeptConnectionsPipelinesAndExpectations) {
  HttpServer server(local());
  answer_size(server);
  server.start();
  RawPeer peer(server.port());
  peer.send(post("a") + post("bb") + post("ccc").substr(0, 20));
  EXPECT_NE(peer.receive("\r\n\r\n1").find("200"), std::string::npos);
  EXPECT_NE(peer.receive("\r\n\r\n2").find("200"), std::string::npos);
  peer.send(post("ccc").substr(20));
  EXPECT_NE(peer.receive("\r\n\r\n3").find("200"), std::string::npos);
  RawPeer waits(server.port());
  waits.send("POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_EQ(waits.receive("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  waits.send("xy");
  const std::string answer = waits.receive("\r\n\r\n2");
  EXPECT_EQ(RawPeer::status_of(answer), 200) << answer;
  RawPeer ends(server.port());
  ends.send("POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx");
  EXPECT_EQ(RawPeer::status_of(ends.receive()), 200);
  EXPECT_TRUE(ends.ended());
}

TEST(Gate, SilentPeersHoldNoThread) {
  HttpServer server(local());
  answer_size(server);
  server.start();
  std::vector<std::unique_ptr<RawPeer>> slow;
  for (int i = 0; i < 200; ++i) {
    slow.push_back(std::make_unique<RawPeer>(server.port(), "127.0.2." + std::to_string(1 + i % 50)));
    slow.back()->send(i % 2 == 0 ? "" : "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nx");
  }
  for (int i = 0; i < 20; ++i) {
    RawPeer good(server.port());
    good.send(post("abc"));
    EXPECT_NE(good.receive("\r\n\r\n3").find("200 OK"), std::string::npos) << "beside 200 connections and 2 threads";
  }
}

TEST(Gate, WhoIsSlowIsClosedInTime) {
  HttpServerOptions options = local();
  options.request_timeout = Milliseconds(300);
  HttpServer server(options);
  answer_size(server);
  server.start();
  RawPeer silent(server.port());
  EXPECT_EQ(silent.receive(), "");
  EXPECT_TRUE(silent.ended());
  RawPeer drips(server.port());  // each byte is in time, the request is not
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  while (drips.send("x", Milliseconds(1000)) == 1 && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(20));
  EXPECT_FALSE(deadline.passed());
}

TEST(Gate, AFullServerClosesWhomItWaitedForLongest) {
  HttpServerOptions options = local();
  options.max_connections = 10;
  options.max_per_peer = 5;
  HttpServer server(options);
  answer_size(server);
  server.start();
  RawPeer first(server.port(), "127.0.3.1");
  std::vector<std::unique_ptr<RawPeer>> same;
  for (int i = 0; i < 4; ++i) same.push_back(std::make_unique<RawPeer>(server.port(), "127.0.3.1"));
  RawPeer other(server.port(), "127.0.3.2");
  same.push_back(std::make_unique<RawPeer>(server.port(), "127.0.3.1"));  // the sixth of its address
  EXPECT_EQ(first.receive(), "");
  EXPECT_TRUE(first.ended());
  std::vector<std::unique_ptr<RawPeer>> many;
  for (int i = 0; i < 20; ++i)
    many.push_back(std::make_unique<RawPeer>(server.port(), "127.0.4." + std::to_string(i + 1)));
  EXPECT_EQ(other.receive(), "");
  EXPECT_TRUE(other.ended()) << "an older one of another address went for the newer ones";
  RawPeer good(server.port());
  good.send(post("abc"));
  EXPECT_NE(good.receive("\r\n\r\n3").find("200 OK"), std::string::npos);
}

// Of 8 requests that come while the first is worked on, `taken` are answered in the end and the others told to come
// back.
void expect_taken(HttpServerOptions options, const std::string& body, int taken) {
  options.max_threads = 1;
  options.request_timeout = Milliseconds(60000);  // nobody is closed because the machine is slow
  std::atomic<bool> go{false}, begun{false};
  HttpServer server(options);
  server.handle("POST", "/", [&](const HttpRequest&) {
    begun = true;
    for (const Deadline deadline = Deadline::after(Milliseconds(120000)); !go && !deadline.passed();)
      std::this_thread::sleep_for(Milliseconds(1));
    return HttpResponse{};
  });
  server.start();
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 8; ++i) {
    peers.push_back(std::make_unique<RawPeer>(server.port()));
    peers.back()->send(post(body));
    // The first is worked on before the others come; which of these comes first is the server's to see.
    for (const Deadline deadline = Deadline::after(Milliseconds(60000)); !begun && !deadline.passed();)
      std::this_thread::sleep_for(Milliseconds(1));
  }
  std::vector<std::string> answers(peers.size());
  const auto refused = [&] {
    return std::count_if(answers.begin(), answers.end(), [](const std::string& answer) { return !answer.empty(); });
  };
  for (const Deadline deadline = Deadline::after(Milliseconds(60000)); refused() < 8 - taken && !deadline.passed();) {
    for (size_t k = 0; k < peers.size(); ++k) {
      if (answers[k].empty()) answers[k] = peers[k]->receive("\r\n\r\n", Milliseconds(20));
    }
  }
  EXPECT_EQ(refused(), 8 - taken);
  go = true;
  int done = 0;
  for (size_t k = 0; k < peers.size(); ++k) {
    if (answers[k].empty()) {
      done += peers[k]->receive("\r\n\r\n").find("200 OK") != std::string::npos;
      continue;
    }
    EXPECT_EQ(RawPeer::status_of(answers[k]), 503);
    EXPECT_NE(answers[k].find("Retry-After: 1\r\n"), std::string::npos);
  }
  EXPECT_EQ(done, taken);
}

TEST(Gate, MoreWholeRequestsThanPlacesAreToldToComeBack) {
  HttpServerOptions options = local();
  options.max_waiting = 1;
  expect_taken(options, "x", 2);  // one is worked on, one waits
}

TEST(Gate, WholeRequestsThatWaitAreBoundedInBytes) {
  HttpServerOptions options = local();
  options.max_body_bytes = 5u << 20;                     // so 20 MiB may wait
  expect_taken(options, std::string(5u << 20, 'x'), 3);  // with their heads four are more
}

TEST(Gate, WhoDoesNotReadHoldsOneThreadAndNotForLong) {
  HttpServerOptions options = local();
  options.answer_timeout = Milliseconds(500);
  options.max_threads = 1;
  HttpServer server(options);
  answer_size(server);
  server.handle("GET", "/long", [](const HttpRequest&) {
    HttpResponse response;
    response.stream = [](const HttpWrite& write) {
      const std::string piece(1u << 16, 'x');
      while (write(piece)) {
      }
    };
    return response;
  });
  server.start();
  RawPeer deaf(server.port());
  deaf.send("GET /long HTTP/1.1\r\nHost: x\r\n\r\n");
  RawPeer good(server.port());
  good.send(post("abc"));
  EXPECT_NE(good.receive("\r\n\r\n3").find("200 OK"), std::string::npos);
}

TEST(Gate, SilentPeersDoNotStopAServerWithTls) {
  const KeyPair ca = make_ca("a");
  LeafOptions leaf;
  leaf.common_name = "x";
  leaf.ip_addresses = {"127.0.0.1"};
  HttpServerOptions options = local();
  options.tls = issue_certificate(ca, leaf);
  HttpServer server(options);
  answer_size(server);
  server.handle("GET", "/big", [](const HttpRequest&) { return HttpResponse{200, std::string(3'000'000, 'y')}; });
  server.start();
  std::vector<std::unique_ptr<RawPeer>> slow;
  for (int i = 0; i < 100; ++i) {
    slow.push_back(std::make_unique<RawPeer>(server.port(), "127.0.5." + std::to_string(i + 1)));
    slow.back()->send(i % 2 == 0 ? "" : std::string("\x16\x03\x01\x00\xf0\x01", 6));  // the head of a handshake
  }
  ClientConfig config;
  config.scheme = "https";
  config.host = "127.0.0.1";
  config.port = server.port();
  config.ca_pem = ca.cert_pem;
  Client client(config);
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  EXPECT_EQ(client.raw({"POST", "/", std::string(60000, 'x'), "text/plain", "test"}, deadline).body, "60000");
  EXPECT_EQ(client.raw({"GET", "/big", "", "", "test"}, deadline).body.size(), 3'000'000u);
  EXPECT_EQ(client.raw({"POST", "/", std::string(65537, 'x'), "text/plain", "test"}, deadline).status, 413);
}

}  // namespace
}  // namespace trireme::kube
