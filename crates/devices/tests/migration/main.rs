//! A guest with VFIO and vfio-user devices moves by the library, over loopback, both sides in this process: the devices are the model's, and
//! everything else is what a monitor has.

mod faults;
#[path = "../../../engine/tests/engine/guest/mod.rs"]
mod guest;
mod machine;
mod moves;
mod reached;
#[allow(dead_code, reason = "what goes wrong there is the other tests' matter")]
#[path = "../vfio/user/server.rs"]
mod server;
