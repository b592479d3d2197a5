//! The driver against a device that shares no definition with it: every operation, by every submission method, with
//! faults, full and disabled queues, and with the real instructions, which trap on CPUs that lack them.

#![cfg(target_arch = "x86_64")]

mod batches;
mod faults;
mod iaa;
mod operations;
mod queues;
mod support;
