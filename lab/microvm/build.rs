//! Compiles the payload that the vCPUs run: the guest's library (`guest/src/lib.rs`) and `payload/payload.rs`, to a flat
//! image at a fixed address. The host's compiler builds it without the standard library or start-up code, so nothing
//! has to be installed or downloaded.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target the payload is compiled for. The compiler that builds for Linux on x86-64 always has its `core`.
const TARGET: &str = "x86_64-unknown-linux-gnu";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=payload");
    println!("cargo::rerun-if-changed=../../guest/src");
    println!("cargo::rustc-check-cfg=cfg(has_kvm)");
    if env::var("TARGET").as_deref() != Ok(TARGET) {
        // The library then runs the same work as threads.
        return;
    }
    println!("cargo::rustc-cfg=has_kvm");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo")).join("../..");
    let root = root.canonicalize().expect("the sources are there");
    let here = root.join("lab/microvm");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let library = out.join("libsterna_guest.rlib");
    // Panic messages name files: remapped, so that the image is the same wherever it is compiled.
    let names = format!("--remap-path-prefix={}=", root.display());
    compile(&root.join("guest/src/lib.rs"), &library, &["--crate-type=lib", "--crate-name=sterna_guest", &names]);
    let script = format!("-Clink-arg=-T{}", here.join("payload/payload.ld").display());
    let guest = format!("--extern=sterna_guest={}", library.display());
    let link = ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,--oformat=binary"]
        .map(|argument| format!("-Clink-arg={argument}"));
    let mut arguments = vec!["--crate-type=bin", "--crate-name=payload", "-Clto=fat", &guest, &script, &names];
    arguments.extend(link.iter().map(String::as_str));
    compile(&here.join("payload/payload.rs"), &out.join("payload.bin"), &arguments);
}

fn compile(source: &Path, output: &Path, arguments: &[&str]) {
    let mut compiler = Command::new(env::var_os("RUSTC").expect("set by cargo"));
    compiler.arg(source).arg("-o").arg(output).args(arguments).args([
        "--edition=2024",
        "--target",
        TARGET,
        "-Copt-level=3",
        "-Cpanic=abort",
        "-Ccodegen-units=1",
        "-Crelocation-model=static",
    ]);
    let status = compiler.status().unwrap_or_else(|error| panic!("cannot run {compiler:?}: {error}"));
    assert!(status.success(), "the payload was not compiled by {compiler:?}");
}
