// Keys of where a run writes and what it runs on: logger, checkpointing and cluster.
#include "trainer/config/field_table.h"

namespace trireme::config {

void add_logger(std::vector<Field>& table) {
  KEY(logger.log_dir)("folder of the step log, the report and dumps");
  KEY(logger.num_val_samples_to_print)("validation responses shown after each validation").at_least(0);
  KEY(logger.tensorboard_enabled)("write event files for TensorBoard");
  KEY(logger.wandb_enabled)
  ("write an offline run to log_dir/wandb; `wandb sync log_dir/wandb/offline-run-*` uploads it");
  KEY(logger.mlflow_enabled)("send steps to an MLflow server");
  KEY(logger.tensorboard.log_dir)("their folder").from("logger.log_dir/tensorboard");
  KEY(logger.wandb.project)("its project").null_as("");
  KEY(logger.wandb.name)("its name; empty: chosen by W&B").null_as("");
  KEY(logger.wandb.entity)("its user or team; empty: whoever uploads it").null_as("");
  KEY(logger.wandb.group)("its group").null_as("");
  KEY(logger.wandb.tags)("its tags").null_default();
  KEY(logger.mlflow.experiment_name)("its experiment; made where there is none");
  KEY(logger.mlflow.run_name)("the run's name; empty: chosen by the server").null_as("");
  KEY(logger.mlflow.tracking_uri)
  ("http(s)://host[:port]; empty: MLFLOW_TRACKING_URI. Credentials come from MLFLOW_TRACKING_TOKEN, or "
   "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
      .null_as("");
  OURS(logger.prometheus.enabled)("serve /metrics and /healthz");
  OURS(logger.prometheus.address)("address to listen on");
  OURS(logger.prometheus.port)("port; 0: chosen by the system").at_least(0).at_most(65535);
  OURS(logger.prometheus.per_rank)("every rank serves, at port + rank");
  OURS(logger.rollouts.enabled)
  ("write log_dir/train_data_step_N.jsonl: a line a sample with prompt, response, reward, its parts by name, "
   "advantage");
  OURS(logger.rollouts.period)("steps between two of them").at_least(1);
  OURS(logger.rollouts.max_samples)("samples in one, at most: whole groups from the first on").at_least(1);
  OURS(logger.rollouts.keep_steps)("files kept; older ones are removed").at_least(1);
  OURS(logger.report)("write log_dir/report.html");
  OURS(logger.report_period)("steps between its updates").at_least(1);
  OURS(logger.dump_steps)("steps whose tensors are written to log_dir").at_least(0).null_default();
}

void add_checkpointing(std::vector<Field>& table) {
  KEY(checkpointing.enabled)("write checkpoints");
  KEY(checkpointing.checkpoint_dir)("their folder");
  KEY(checkpointing.metric_name)
  ("value that ranks them, of the step they belong to; one without it ranks last; null: the newest are kept. GRPO: "
   "val:accuracy (the default), val:avg_length, val:pass_k, train:reward, train:loss, train:grad_norm, "
   "train:correct_rate, train:truncation_rate, train:mean_gen_tokens_per_sample. SFT: val:loss, train:loss, "
   "train:grad_norm")
      .null_as("");
  KEY(checkpointing.higher_is_better)("direction of that metric");
  KEY(checkpointing.keep_top_k)("checkpoints kept; 0 or null: all").at_least(0).null_as("0");
  KEY(checkpointing.save_period)("steps between checkpoints").at_least(1);
  KEY(checkpointing.save_optimizer)("with optimizer state, so that a run can be resumed");
  KEY(checkpointing.checkpoint_must_save_by)
  ("days:hours:minutes:seconds after the start at which a checkpoint is written and the run ends").null_default();
  OURS(checkpointing.staging_gib)
  ("GiB of host memory in which a rank keeps what is copied and not written yet; 0: all that its part of a checkpoint "
   "needs, but no more than its share of half of the memory available at the start")
      .at_least(0);
}

void add_cluster(std::vector<Field>& table) {
  KEY(cluster.gpus_per_node)("devices on each node").at_least(1);
  KEY(cluster.num_nodes)("nodes").at_least(1);
  OURS(cluster.processes)("ranks on each node").from("cluster.gpus_per_node").at_least(1);
  OURS(cluster.device)("auto: cuda where there is one").one_of({"auto", "cpu", "cuda"});
  OURS(cluster.collective_timeout_s)("deadline of every collective and of the rendezvous").above(0).at_most(1e6);
}

}  // namespace trireme::config
