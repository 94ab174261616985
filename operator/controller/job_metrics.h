// The operator's own metrics about jobs, written straight from the informer's store at each scrape: no series outlives
// its job, and ten thousand jobs cost no memory for series.
#pragma once

#include <string>

#include "operator/controller/reconciler.h"
#include "operator/kube/http_server.h"

namespace trireme::controller {

// Writes the text exposition of trireme_job_* and trireme_jobs in pieces of some 64 KiB, until write returns false; the
// store is not locked meanwhile. Only a leader should show it: a standby would double every job.
void write_job_metrics(const Reconciler& reconciler, const ReportStore& reports, const kube::HttpWrite& write);

}  // namespace trireme::controller
