//! The library moves a guest with VFIO and vfio-user devices, over loopback, with both sides in this process: the
//! devices are models, and everything else is as in a monitor.

mod faults;
#[path = "../../../engine/tests/engine/guest/mod.rs"]
mod guest;
mod machine;
mod moves;
mod reached;
#[allow(dead_code, reason = "other tests use its faults")]
#[path = "../vfio/user/server.rs"]
mod server;
