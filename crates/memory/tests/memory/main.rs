//! Dirty logs, missing pages and discarding, with the kernel's own interfaces, of this and of another process.

mod dirty_combined;
mod dirty_freed;
mod dirty_in_flight;
mod dirty_kvm;
mod dirty_other_process;
mod dirty_support;
mod dirty_write_protect;
mod discard;
mod missing;
mod missing_other_process;
mod missing_support;
