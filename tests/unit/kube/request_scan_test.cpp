#include "operator/kube/request_scan.h"

#include <gtest/gtest.h>

#include <string>

namespace trireme::kube {
namespace {

using State = RequestScan::State;

RequestScan scan(const std::string& bytes, size_t max_body = 100) {
  RequestLimits limits;
  limits.max_head_bytes = 1000;
  limits.max_headers = 10;
  limits.max_body_bytes = max_body;
  return scan_request(bytes, limits);
}

TEST(RequestScan, WholeOnlyWhenTheLastByteIsThere) {
  const std::string request = "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc";
  for (size_t size = 0; size < request.size(); ++size) {
    EXPECT_EQ(scan(request.substr(0, size)).state, State::kMore) << size;
  }
  const RequestScan whole = scan(request + "GET /next HTTP/1.1\r\n");
  EXPECT_EQ(whole.state, State::kWhole);
  EXPECT_EQ(whole.size, request.size());
  EXPECT_EQ(scan("GET / HTTP/1.1\r\n\r\n").state, State::kWhole);
}

TEST(RequestScan, BodiesOfUnknownSizeAreRefusedAtTheirHeaders) {
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n").status, 411);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\ntransfer-ENCODING : chunked\r\n\r\n").status, 400) << "a blank before the colon";
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: gzip, chunked\r\n\r\n").status, 411);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n").status, 415);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nContent-Length: 101\r\n\r\n").status, 413);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n").status, 400);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nContent-Encoding: identity\r\nContent-Length: 1\r\n\r\nx").state, State::kWhole);
}

TEST(RequestScan, HeadsAreBounded) {
  EXPECT_EQ(scan(std::string(1000, 'a')).status, 431);
  EXPECT_EQ(scan("GET / HTTP/1.1\r\nX: " + std::string(2000, 'a') + "\r\n\r\n").status, 431);
  std::string many = "GET / HTTP/1.1\r\n";
  for (int i = 0; i < 11; ++i) many += "X: y\r\n";
  EXPECT_EQ(scan(many + "\r\n").status, 431);
}

TEST(RequestScan, WhatTwoReadersCouldReadDifferentlyIsRefused) {
  for (const char* line :
       {"Content-Length: 3\r\nContent-Length: 4", "Content-Length: +3", "Content-Length: 0x3",
        "Content-Length:", "Content-Length: 3, 3", "no colon", " folded: header", "Na me: x", ": x", "X: a\rb"}) {
    EXPECT_EQ(scan(std::string("POST / HTTP/1.1\r\n") + line + "\r\n\r\nabcd").status, 400) << line;
  }
  EXPECT_EQ(scan("\r\n\r\n").status, 400);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx").state, State::kWhole);
}

TEST(RequestScan, ExpectationsAreFoundBeforeTheBody) {
  const std::string head = "POST / HTTP/1.1\r\nExpect: 100-Continue\r\nContent-Length: 3\r\n\r\n";
  const RequestScan waiting = scan(head);
  EXPECT_EQ(waiting.state, State::kMore);
  EXPECT_EQ(head.substr(waiting.expect_at, 7), "Expect:");
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n").status, 413);
  EXPECT_EQ(scan("POST / HTTP/1.1\r\nExpect: more\r\n\r\n").status, 417);
}

}  // namespace
}  // namespace trireme::kube
