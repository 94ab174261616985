// Keys of the two back-ends of NeMo-RL: policy.megatron_cfg and policy.dtensor_cfg.
#include "trainer/config/field_table.h"

namespace trireme::config {

void add_megatron(std::vector<Field>& table) {
  MODEL(megatron_cfg.enabled)("the Megatron-style back-end: its sizes, optimizer and scheduler count");
  MODEL(megatron_cfg.tensor_model_parallel_size)
  ("ranks that share each layer. A size that is auto is chosen by `trireme plan` (docs/layouts.md) and refused by a "
   "run")
      .at_least(1)
      .or_auto();
  MODEL(megatron_cfg.pipeline_model_parallel_size)("pipeline stages").at_least(1).or_auto();
  MODEL(megatron_cfg.context_parallel_size)("ranks that share each sequence").at_least(1).or_auto();
  MODEL(megatron_cfg.expert_model_parallel_size)("ranks that share the experts").at_least(1).or_auto();
  MODEL(megatron_cfg.expert_tensor_parallel_size)("ranks that share each expert").at_least(1);
  MODEL(megatron_cfg.sequence_parallel)
  ("read by NeMo-RL's files; rows are sharded over the tensor ranks outside of attention and MLP, whether or not");
  OUR_MODEL(megatron_cfg.tp_comm_overlap)
  ("tensor-parallel ranks exchange rows while they compute the products around, in training; the bits are the same");
  MODEL(megatron_cfg.num_layers_in_first_pipeline_stage)("layers of the first stage").from("evenly").at_least(1);
  MODEL(megatron_cfg.num_layers_in_last_pipeline_stage)("layers of the last stage").from("evenly").at_least(1);
  OUR_MODEL(megatron_cfg.virtual_pipeline_model_parallel_size)
  ("pieces of each stage, which take turns (Megatron's interleaved schedule): less waiting, more messages")
      .at_least(1)
      .null_as("1");
  MODEL(megatron_cfg.activation_checkpointing)
  ("keep only the input of each layer for backward; counts where recompute_granularity is null");
  MODEL(megatron_cfg.recompute_granularity)
  ("what backward computes again; full: layers, selective: recompute_modules of every layer; null: what "
   "activation_checkpointing says, and where that is false as little as the device's memory asks for. With "
   "activation_checkpointing false it counts as null, as in NeMo-RL; alone it sets activation_checkpointing")
      .one_of({"auto", "full", "selective"})
      .null_as("auto");
  MODEL(megatron_cfg.recompute_method)
  ("with full: every layer (uniform), or the first recompute_num_layers (block)").one_of({"uniform", "block"});
  MODEL(megatron_cfg.recompute_num_layers)
  ("layers of each piece of a stage computed again with block; 1 with uniform").at_least(0);
  MODEL(megatron_cfg.recompute_modules)
  ("with selective: layernorm, mlp_act (SwiGLU), moe (gate and up of experts), core_attn (always so here)")
      .null_default();
  MODEL(megatron_cfg.freeze_moe_router)("routers are not trained");
  MODEL(megatron_cfg.moe_router_dtype)("dtype of router logits").one_of({"fp64", "fp32"}).null_as("fp32");
  MODEL(megatron_cfg.moe_router_load_balancing_type)
  ("loss that balances experts: of a micro-batch's tokens (aux_loss), of each sample's (seq_aux_loss)")
      .one_of({"none", "aux_loss", "seq_aux_loss"});
  MODEL(megatron_cfg.moe_aux_loss_coeff)("its weight").at_least(0);
  MODEL(megatron_cfg.moe_router_bias_update_rate)("step of the loss-free balancing bias").at_least(0);
  MODEL(megatron_cfg.defer_fp32_logits)("logits become fp32 chunk by chunk (always so here)");
}

void add_megatron_optimizer(std::vector<Field>& table) {
  MODEL(megatron_cfg.optimizer.optimizer)("kind of optimizer").one_of({"adam"});
  MODEL(megatron_cfg.optimizer.lr)("learning rate").at_least(0);
  MODEL(megatron_cfg.optimizer.min_lr)("learning rate at the end of the decay").at_least(0);
  MODEL(megatron_cfg.optimizer.weight_decay)("decoupled weight decay").at_least(0);
  MODEL(megatron_cfg.optimizer.adam_beta1)("decay of the first moment").at_least(0).below(1);
  MODEL(megatron_cfg.optimizer.adam_beta2)("decay of the second moment").at_least(0).below(1);
  MODEL(megatron_cfg.optimizer.adam_eps)("added to the root of the second moment").above(0);
  MODEL(megatron_cfg.optimizer.params_dtype)
  ("dtype of the master weights; bfloat16 is not supported yet").one_of({"float32", "bfloat16"});
  MODEL(megatron_cfg.optimizer.use_distributed_optimizer)
  ("optimizer state sharded over data parallel ranks; here data_parallel_sharding_strategy decides");
  MODEL(megatron_cfg.optimizer.clip_grad)
  ("gradients are scaled down to this norm; 0: never").from("policy.max_grad_norm").at_least(0);
  MODEL(megatron_cfg.scheduler.start_weight_decay)
  ("weight decay at the start").from("optimizer.weight_decay").at_least(0);
  MODEL(megatron_cfg.scheduler.end_weight_decay)
  ("weight decay at the end").from("optimizer.weight_decay").at_least(0);
  MODEL(megatron_cfg.scheduler.weight_decay_incr_style)
  ("how it goes from start to end").one_of({"constant", "linear", "cosine"});
  MODEL(megatron_cfg.scheduler.lr_decay_style)
  ("how the learning rate falls after the warm-up").one_of({"constant", "linear", "cosine", "inverse-square-root"});
  MODEL(megatron_cfg.scheduler.lr_decay_iters)
  ("steps (rollouts) of warm-up and decay together").at_least(1).null_default();
  MODEL(megatron_cfg.scheduler.lr_warmup_iters)("steps (rollouts) of the linear warm-up").at_least(0);
  MODEL(megatron_cfg.scheduler.lr_warmup_init)("learning rate at its start").at_least(0);
  MODEL(megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32)
  ("gradients are summed over ranks in fp32");
  MODEL(megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce)
  ("gradients are summed over ranks bucket by bucket while the backward pass runs; the bits are the same");
  MODEL(megatron_cfg.distributed_data_parallel_config.overlap_param_gather)
  ("weights are gathered bucket by bucket while the next forward pass runs; the bits are the same");
  MODEL(megatron_cfg.distributed_data_parallel_config.use_custom_fsdp)
  ("whether data_parallel_sharding_strategy counts; false, as in NeMo-RL's files: optim, whatever it says");
  MODEL(megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy)
  ("what data parallel ranks share: nothing, optimizer state, gradients too, weights too (layouts.md)")
      .one_of({"no_shard", "optim", "optim_grads", "optim_grads_params"});
}

void add_dtensor(std::vector<Field>& table) {
  MODEL(dtensor_cfg.enabled)
  ("the FSDP-style back-end: its sizes and policy.optimizer, policy.scheduler count; state is optim_grads_params");
  MODEL(dtensor_cfg.tensor_parallel_size)("ranks that share each layer").at_least(1).or_auto();
  MODEL(dtensor_cfg.context_parallel_size)("ranks that share each sequence").at_least(1).or_auto();
  MODEL(dtensor_cfg.expert_parallel_size)("ranks that share the experts").at_least(1).or_auto();
  MODEL(dtensor_cfg.sequence_parallel)
  ("read by NeMo-RL's files; rows are sharded over the tensor ranks outside of attention and MLP, whether or not");
  MODEL(dtensor_cfg.cpu_offload)("weights and optimizer state on the host; not supported yet");
  MODEL(dtensor_cfg.activation_checkpointing)("keep only the input of each layer for backward");
}

}  // namespace trireme::config
