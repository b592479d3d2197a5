//! The `sterna` program, run as its users run it: most of these tests move real guests between real QEMUs.
//!
//! One test binary for all, because linking is slow, and because these tests mostly wait, so many of them run at a
//! time.

mod accel;
mod accel_config;
mod bad_input;
mod connections;
mod control;
mod crash;
mod deltas;
mod direct;
mod direct_options;
mod disks;
mod dry_run;
mod exit_codes;
mod first_moment;
mod forwarded_monitor;
mod guest_ends;
mod machines;
mod move_guest;
mod moved_by_others;
mod neighbours;
mod other_hands;
mod outcomes;
mod post_copy;
mod preallocated;
mod proxy;
mod resume;
mod security;
mod slow_storage;
mod soak;
mod support;
mod table;
mod unresponsive;
mod usage;
mod virtiofs;
mod waiting;
