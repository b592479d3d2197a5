//! Makes the compiler know the configuration under which the queue modules are checked by loom.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rerun-if-changed=build.rs");
}
