//! What an init needs of Linux: mounts, the console, memory, and the way out. All of the guest's `unsafe` is here.

use std::ffi::CStr;
use std::ffi::CString;
use std::fmt::Arguments;
use std::fs::File;
use std::io::{Error, Result, Write};
use std::os::fd::AsRawFd;
use std::time::Duration;

use sterna_guest::content::{PAGE_BYTES, Page};

/// Mounts /proc, /sys and /dev, each unless it is there already.
pub fn mount_basics() -> Result<()> {
    for (kind, path) in [(c"proc", c"/proc"), (c"sysfs", c"/sys"), (c"devtmpfs", c"/dev")] {
        mount(kind, path)?;
    }
    Ok(())
}

fn mount(kind: &CStr, path: &CStr) -> Result<()> {
    // SAFETY: the three strings are terminated and live; no data is passed.
    let done = unsafe {
        libc::mkdir(path.as_ptr(), 0o755);
        libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, std::ptr::null())
    };
    match Error::last_os_error() {
        _ if done == 0 => Ok(()),
        // The kernel mounts devtmpfs itself where it is built to.
        error if error.raw_os_error() == Some(libc::EBUSY) => Ok(()),
        error => Err(error),
    }
}

/// Mounts the directory that the host shares under `tag` by virtiofs.
pub fn mount_shared(tag: &str, path: &str) -> Result<()> {
    std::fs::create_dir(path)?;
    let (tag, path) = (CString::new(tag)?, CString::new(path)?);
    // SAFETY: the three strings are terminated and live; no data is passed.
    let done = unsafe { libc::mount(tag.as_ptr(), path.as_ptr(), c"virtiofs".as_ptr(), 0, std::ptr::null()) };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Gives the kernel the modules that the guest was given, in the order of their names.
pub fn load_modules() -> Result<()> {
    let mut modules: Vec<_> = std::fs::read_dir("/modules")?.flatten().map(|entry| entry.path()).collect();
    modules.sort();
    modules.iter().try_for_each(|module| {
        load_module(&File::open(module)?).map_err(|error| Error::other(format!("{}: {error}", module.display())))
    })
}

fn load_module(file: &File) -> Result<()> {
    // SAFETY: the descriptor is open, and the empty string of parameters is terminated and live.
    let done = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Bytes that /proc/meminfo calls free.
pub fn free_memory() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kilobytes =
        text.lines().find_map(|line| line.strip_prefix("MemFree:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| Error::other("no MemFree"))
}

/// Maps `count` pages of anonymous memory for the rest of the program's life.
pub fn allocate_pages(count: usize) -> Result<&'static mut [Page]> {
    let bytes = count * PAGE_BYTES;
    // SAFETY: a new private anonymous mapping, at an address that the kernel chooses.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    // SAFETY: the mapping was just made, of this size, page aligned, zero-filled, never unmapped, and nobody else has it.
    // Huge pages only make filling faster, so a refusal is no error.
    unsafe {
        libc::madvise(address, bytes, libc::MADV_HUGEPAGE);
        Ok(std::slice::from_raw_parts_mut(address.cast::<Page>(), count))
    }
}

/// Powers the machine off. Does not come back.
pub fn power_off() -> ! {
    // SAFETY: no memory is passed; as init this program is allowed to.
    unsafe {
        libc::sync();
        libc::reboot(libc::RB_POWER_OFF);
    }
    loop {
        std::thread::park();
    }
}

/// The serial line: lines out, commands in.
pub struct Console {
    pending: Vec<u8>,
}

impl Console {
    /// The console that the kernel opened as standard input and output, switched to pass bytes on as they are.
    pub fn open() -> Self {
        // SAFETY: termios is plain data that the kernel fills in before it is read.
        unsafe {
            let mut terminal: libc::termios = std::mem::zeroed();
            if libc::tcgetattr(0, &mut terminal) == 0 {
                libc::cfmakeraw(&mut terminal);
                libc::tcsetattr(0, libc::TCSANOW, &terminal);
            }
        }
        Console { pending: Vec::new() }
    }

    /// Writes `sterna-guest TEXT` and a line end, in one piece.
    pub fn line(&mut self, text: Arguments<'_>) {
        let line = format!("sterna-guest {text}\r\n");
        // Nobody is left to tell that the console failed.
        let _ = std::io::stdout().write_all(line.as_bytes()).and_then(|()| std::io::stdout().flush());
    }

    /// The next command, if one arrives within `wait`.
    pub fn command(&mut self, wait: Duration) -> Option<String> {
        if let Some(command) = self.take_line() {
            return Some(command);
        }
        let mut poll = libc::pollfd { fd: 0, events: libc::POLLIN, revents: 0 };
        let wait = libc::timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
        let mut bytes = [0u8; 256];
        // SAFETY: one live pollfd and timespec; the read gets the buffer's own length.
        let got = unsafe {
            if libc::ppoll(&mut poll, 1, &wait, std::ptr::null()) <= 0 {
                return None;
            }
            libc::read(0, bytes.as_mut_ptr().cast(), bytes.len())
        };
        if got <= 0 {
            // A console that is gone is always readable: do not spin on it.
            std::thread::sleep(Duration::from_millis(10));
            return None;
        }
        self.pending.extend_from_slice(&bytes[..got as usize]);
        // No command is this long: whoever wrote it means something else.
        if self.pending.len() > 4096 {
            self.pending.clear();
        }
        self.take_line()
    }

    fn take_line(&mut self) -> Option<String> {
        let end = self.pending.iter().position(|&byte| byte == b'\n' || byte == b'\r')?;
        let line: Vec<u8> = self.pending.drain(..=end).take(end).collect();
        Some(String::from_utf8_lossy(&line).trim().to_owned())
    }
}
