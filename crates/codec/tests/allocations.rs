//! Once a context has seen a batch, encoding and decoding allocate nothing more.
//!
//! Counts what goes through Rust's allocator, and what libdeflate asks for; the memory of the zstd context is C's, and a test
//! beside its code watches it. A file of its own because an allocator is the whole program's; it counts per thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;
use sterna_codec::{Encoded, Encoder, Encoding, Engine, Engines, Iaa, MethodChoice, Qat, QatzipSoftware};
use sterna_idxd::{Submission, WorkQueue};
use sterna_idxd_model::{Model, ModelConfig};
use sterna_offload::{Offload, Settings};
use sterna_test_kit::content::noise;
use sterna_test_kit::portal::FakePortal;
use sterna_test_kit::qatzip;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// libdeflate's: C's, counted.
unsafe extern "C" fn counted(bytes: usize) -> *mut c_void {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    // SAFETY: no conditions.
    unsafe { libc::malloc(bytes) }
}

unsafe extern "C" fn given_back(memory: *mut c_void) {
    // SAFETY: libdeflate gives back what `counted` gave it.
    unsafe { libc::free(memory) }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns a queue of the model's as one whose submissions are not counted: what the model allocates for a descriptor, no device would.
fn uncounted(queue: Arc<WorkQueue>) -> Arc<WorkQueue> {
    let info = queue.info().clone();
    let portal = FakePortal::new(queue.submit_method(), move |descriptor| {
        let before = ALLOCATIONS.get();
        // SAFETY: the promise of the job's submitter is passed on.
        let accepted = unsafe { queue.submit(descriptor) }.is_ok();
        ALLOCATIONS.set(before);
        if accepted { Submission::Accepted } else { Submission::Retry }
    });
    WorkQueue::with_portal(info, portal).unwrap()
}

fn with_iaa(faults: &str) -> Arc<Offload> {
    let iaa = r#"{"name":"iax1","kind":"iaa","queues":[{"name":"wq1.0","size":64}]}"#;
    let config = ModelConfig::from_json(&format!(r#"{{"devices":[{iaa}],"faults":{faults}}}"#)).unwrap();
    let mut settings = Settings::default();
    // The model is a hundred times slower than a device, on a busy machine more.
    (settings.lateness, settings.patience) = (Duration::from_secs(60), Duration::from_secs(60));
    let queues = sterna_offload::model::queues(&Model::start(config).unwrap()).unwrap();
    Offload::with_queues(queues.into_iter().map(uncounted).collect(), &settings).unwrap()
}

#[test]
fn no_batch_allocates_whether_it_shrinks_or_not_or_is_broken() {
    let shrinks: Vec<u8> = (0..524_288u32).map(|at| (at / 9) as u8 & 7).collect();
    let noise = noise(1, shrinks.len());
    // SAFETY: before any other use of libdeflate, and for the whole program.
    unsafe { libdeflate_sys::libdeflate_set_memory_allocator(counted, given_back) };
    let (mut packet, mut decoded) = (vec![0; shrinks.len()], vec![0; shrinks.len()]);
    let deflate = |engine| "deflate".parse::<MethodChoice>().unwrap().encoding(engine).unwrap();
    let mut all: Vec<_> = Encoding::all_by(Engine::Cpu).map(|encoding| (encoding, Engines::default())).collect();
    assert!(all.len() > 1);
    if let Some(library) = qatzip::library() {
        let qat = Qat::start(&library, 1, QatzipSoftware::Always, 1, Duration::ZERO).unwrap();
        all.push((deflate(Engine::Qat), Engines::default().with_qat(Arc::new(qat))));
    }
    // An IAA of the software model: what a device does, and what it leaves to the CPU.
    for faults in ["[]", r#"[{"opcode":67,"every":3,"what":{"page_fault":{"per_mille":0}}}]"#] {
        for verifying in [false, true] {
            let offload = with_iaa(faults);
            let iaa = Iaa::new(&offload, &offload.guest(1)).unwrap().verifying(verifying);
            all.push((deflate(Engine::Iaa), Engines::default().with_iaa(Arc::new(iaa))));
        }
    }
    for (encoding, engines) in all {
        let made = ALLOCATIONS.get();
        let (mut encoder, mut decoder) = (encoding.encoder(&engines).unwrap(), encoding.format().decoder().unwrap());
        encoder.encode(&shrinks, &mut packet).unwrap();
        let before = ALLOCATIONS.get();
        // The libraries of these are seen: a box and a context at least on either side.
        let seen = ["deflate", "gzip"].contains(&encoding.format().name());
        assert!(!seen || before - made >= 4, "{encoding} is made of {} allocations", before - made);
        for _ in 0..20 {
            if let Encoded::Shrunk(len) = encoder.encode(&shrinks, &mut packet).unwrap() {
                decoder.decode(&packet[..len], &mut decoded).unwrap();
                assert!(decoder.decode(&packet[..len / 2], &mut decoded).is_err());
            }
            assert_eq!(encoder.encode(&noise, &mut packet).unwrap(), Encoded::Incompressible);
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{encoding}");
    }
}
