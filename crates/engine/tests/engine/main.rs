//! The library from outside: whole migrations, odd peers, odd devices, faults, networks that lose and delay.

mod accelerated;
mod accelerated_deltas;
mod again;
mod bad_peers;
mod common;
mod damaged;
mod deaf_peers;
mod deltas;
mod device;
mod devices;
mod faults;
mod fewer_packets;
mod guest;
mod guest_ranges;
mod iaa;
mod library;
mod live_control;
mod moving;
mod no_threads;
mod odd_destinations;
mod odd_devices;
mod odd_sources;
mod opening;
mod post_copy;
mod progress;
mod recovery;
mod refused_deltas;
mod resume;
// The names of system calls differ between architectures.
#[cfg(target_arch = "x86_64")]
mod sandboxed;
mod saving;
mod settle_io;
mod simulated_network;
mod slow_start;
mod small_window;
