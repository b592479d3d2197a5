//! Measures on this machine the cost of finding memory that is freed while a guest is migrated:
//! `cargo run --release -p sterna-bench --example given_back [-- GIB]`
//!
//! For 1 GiB of populated memory, or as much as is asked for: `start` of a log, a look while nothing has changed, and a look
//! after a sixteenth was freed in pieces of 64 KiB. The last collection of a migration is made while the guest is paused.
//! Shown in milliseconds per GiB: the median of 9, and the least and the most.

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;
use sterna_memory::PAGE_SIZE;
use sterna_memory::bitmap::PageBitmap;
use sterna_memory::dirty::DirtyLog;
use sterna_memory::dirty::punched::{PunchedLog, SharedFile};
use sterna_memory::dirty::reported::ReportedLog;
use sterna_memory::dirty::write_protect::WriteProtectLog;

const GIB: usize = 1 << 30;
const PIECE: usize = 64 << 10;
const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gib: usize = std::env::args().nth(1).map_or(Ok(1), |text| text.parse())?;
    for (name, shared, advice) in [
        ("anonymous memory, pages of 4 KiB", false, Advice::LinuxNoHugepage),
        ("anonymous memory, huge pages", false, Advice::LinuxHugepage),
        ("a memory file, pages of 4 KiB", true, Advice::LinuxNoHugepage),
    ] {
        println!("{name}:");
        measure(gib * GIB, shared, advice)?;
    }
    Ok(())
}

fn measure(len: usize, shared: bool, advice: Advice) -> Result<(), Box<dyn std::error::Error>> {
    let file = File::from(memfd_create("given-back", MemfdFlags::CLOEXEC)?);
    file.set_len(len as u64)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: new mappings at addresses of the kernel's choice disturb nothing.
    let start = unsafe {
        if shared {
            mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0)?
        } else {
            mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)?
        }
    };
    // SAFETY: advice on our own mapping.
    unsafe { madvise(start, len, advice)? };
    let populate = || {
        for page in (0..len).step_by(PAGE_SIZE) {
            // SAFETY: within our own mapping, which nothing else accesses.
            unsafe { start.cast::<u8>().add(page).write_volatile(1) };
        }
    };
    let file = Arc::new(file);
    let pages = (len / PAGE_SIZE) as u64;
    let addresses = start.expose_provenance()..start.addr() + len;
    let mut figures = [(); 3].map(|()| Vec::new());
    for _ in 0..ROUNDS {
        populate();
        // Of shared memory, the log of holes alone: a log of writes comes on top.
        let mut log: Box<dyn DirtyLog> = if shared {
            let block = SharedFile { file: Arc::clone(&file), offset: 0, pages };
            Box::new(PunchedLog::new(Box::new(ReportedLog::new(&[pages])), vec![Some(block)]))
        } else {
            Box::new(WriteProtectLog::new(vec![addresses.clone()])?)
        };
        let mut dirty = PageBitmap::new(pages);
        let mut time = |index: usize, what: &mut dyn FnMut() -> Result<(), Box<dyn std::error::Error>>| {
            let before = Instant::now();
            let result = what();
            figures[index].push(before.elapsed().as_secs_f64() * 1e3 / (len as f64 / GIB as f64));
            result
        };
        time(0, &mut || Ok(log.start()?))?;
        time(1, &mut || Ok(log.collect(0, &mut dirty)?))?;
        for at in (0..len).step_by(16 * PIECE) {
            if shared {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&*file, punch, at as u64, PIECE as u64)?;
            } else {
                // SAFETY: within our own mapping; its content is not needed.
                unsafe { madvise(start.wrapping_byte_add(at), PIECE, Advice::LinuxDontNeed)? };
            }
        }
        time(2, &mut || Ok(log.collect(0, &mut dirty)?))?;
        if dirty.count() < pages / 16 {
            return Err(format!("{} of {} pages were named", dirty.count(), pages / 16).into());
        }
        log.stop()?;
    }
    for (name, mut figures) in ["start", "look, nothing changed", "look, 1/16 given back"].into_iter().zip(figures) {
        figures.sort_by(f64::total_cmp);
        println!("  {name:24} {:8.2}  ({:.2} to {:.2})", figures[ROUNDS / 2], figures[0], figures[ROUNDS - 1]);
    }
    // SAFETY: mapped above, used no more.
    unsafe { munmap(start, len)? };
    Ok(())
}
