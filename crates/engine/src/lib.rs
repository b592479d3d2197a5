//! Live migration of virtual machines: the pipeline, its channels and transports, the switchover.
