// The operator's own metrics about jobs, written straight from the informer's store at each scrape: no series outlives
// its job, and ten thousand jobs cost no memory for series.
#pragma once

#include <string>

#include "operator/controller/reconciler.h"

namespace trireme::controller {

// Text exposition of trireme_job_* and trireme_jobs. Only a leader should show it: a standby would double every job.
std::string job_metrics_text(const Reconciler& reconciler, const ReportStore& reports);

}  // namespace trireme::controller
