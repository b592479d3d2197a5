//! The programs that are attached to. Each prints `ready`, does its work until its standard input ends, checks it, and prints `result …`.
//! What goes wrong is printed and makes the program end with 3.

use std::io::{BufRead, Write};

/// Plays a role, with its arguments.
pub(crate) fn play(words: &[String]) {
    let arguments: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
    match words[0].as_str() {
        "memory" => memory(),
        role => panic!("no role {role}: {arguments:?}"),
    }
}

/// Sends a signal.
pub(crate) fn kill(pid: i32, signal: libc::c_int) {
    // SAFETY: kill takes numbers.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn say(line: &str) {
    let mut out = std::io::stdout();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Memory of both kinds, written as the test says.
fn memory() {
    const LENGTH: usize = 64 * 4096;
    let map = |flags, descriptor| {
        // SAFETY: a new mapping, whose address the kernel chooses.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_READ | libc::PROT_WRITE, flags, descriptor, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>()
    };
    // SAFETY: a name that ends with zero.
    let memfd = unsafe { libc::memfd_create(c"memory".as_ptr(), 0) };
    // SAFETY: takes numbers.
    assert_eq!(unsafe { libc::ftruncate(memfd, LENGTH as i64) }, 0);
    let regions = [map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1), map(libc::MAP_SHARED, memfd)];
    say(&format!("ready {:x} {:x}", regions[0] as usize, regions[1] as usize));
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if words[0] == "open-device" {
            // SAFETY: a name that ends with zero.
            let number = unsafe { libc::open(c"/dev/userfaultfd".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
            say(&if number < 0 { "none".into() } else { number.to_string() });
            continue;
        }
        let (region, page) = (words[1].parse::<usize>().unwrap(), words[2].parse::<usize>().unwrap());
        // SAFETY: within the mapping.
        let at = unsafe { regions[region].add(page * 4096) };
        match words[0] {
            // SAFETY: within the mapping.
            "write" => unsafe { at.write_volatile(at.read_volatile().wrapping_add(1)) },
            "read-into" => {
                // SAFETY: a name that ends with zero; the buffer is within the mapping.
                let got = unsafe {
                    let zero = libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
                    let got = libc::read(zero, at.cast(), 100);
                    libc::close(zero);
                    got
                };
                assert_eq!(got, 100);
            }
            word => panic!("{word}"),
        }
        say("done");
    }
    say("result done");
}
