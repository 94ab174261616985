// WorkServer: the desk by HTTP/1.1, on threads of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "trainer/work/shared_desk.h"

namespace trireme {

struct WorkServerOptions {
  std::string address = "0.0.0.0";
  int port = 0;        // 0: the system chooses
  std::string ticket;  // who has it may ask: "Authorization: Bearer TICKET"
  size_t max_body_bytes = 64 << 20;
};

// Answers from construction to destruction; what waits in the desk then is answered first. A request without the ticket
// gets 401 before its body is read, one with a malformed body 400, a caller that joined another actor 409, an engine
// that may not join 403; the body of these is the reason.
class WorkServer final {
 public:
  // Throws Error(kIo) when the port is taken or not allowed.
  WorkServer(const WorkServerOptions& options, SharedDesk& desk);
  ~WorkServer();
  WorkServer(const WorkServer&) = delete;
  WorkServer& operator=(const WorkServer&) = delete;

  int port() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
