//! Resource usage of a process: CPU seconds, page faults, memory. Read from `/proc` (proc_pid_stat(5)).

use crate::Error;

/// A process's resource usage since its start, or between two points of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// CPU seconds in user mode of all threads, including ended ones. In steps of 10 ms.
    pub user_seconds: f64,
    /// CPU seconds in the kernel.
    pub system_seconds: f64,
    /// Page faults without reading from storage.
    pub minor_faults: u64,
    /// Page faults with reading from storage.
    pub major_faults: u64,
    /// Peak of the resident bytes (of the whole life, also in a difference).
    pub max_resident_bytes: u64,
}

impl Usage {
    /// Returns the usage of process `pid` so far.
    ///
    /// # Errors
    /// [`Error::Io`] if the process has ended.
    pub fn of(pid: u32) -> Result<Usage, Error> {
        let read = |file: &str| {
            let path = format!("/proc/{pid}/{file}");
            std::fs::read_to_string(&path).map_err(Error::io(format!("reading {path}")))
        };
        let (stat, status) = (read("stat")?, read("status")?);
        parse(&stat, &status).ok_or_else(|| Error::Io {
            action: format!("reading /proc/{pid}/stat"),
            source: std::io::ErrorKind::InvalidData.into(),
        })
    }

    /// Returns the CPU seconds in user mode and in the kernel together.
    #[must_use]
    pub fn cpu_seconds(&self) -> f64 {
        self.user_seconds + self.system_seconds
    }

    /// Returns the usage between `earlier` and this.
    #[must_use]
    pub fn since(&self, earlier: &Usage) -> Usage {
        Usage {
            user_seconds: self.user_seconds - earlier.user_seconds,
            system_seconds: self.system_seconds - earlier.system_seconds,
            minor_faults: self.minor_faults.saturating_sub(earlier.minor_faults),
            major_faults: self.major_faults.saturating_sub(earlier.major_faults),
            max_resident_bytes: self.max_resident_bytes,
        }
    }
}

fn parse(stat: &str, status: &str) -> Option<Usage> {
    // The name in parentheses may contain anything; the third field follows the last parenthesis.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let tick = rustix::param::clock_ticks_per_second() as f64;
    // A zombie has no VmHWM.
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Some(Usage {
        user_seconds: field(14)? as f64 / tick,
        system_seconds: field(15)? as f64 / tick,
        minor_faults: field(10)?,
        major_faults: field(12)?,
        max_resident_bytes: peak.unwrap_or(0) * 1024,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_after_a_name_with_spaces_and_parentheses() {
        let stat = "12 (a) b) S 1 12 12 0 -1 4194560 77 5 3 0 250 50 0 0 20 0 1 0 100 1000 20";
        let usage = parse(stat, "Name:\tx\nVmHWM:\t    2048 kB\n").expect("parsed");
        let tick = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!((usage.minor_faults, usage.major_faults, usage.max_resident_bytes), (77, 3, 2 << 20));
        assert!((usage.cpu_seconds() - 300.0 / tick).abs() < 1e-9);
    }

    #[test]
    fn touching_memory_shows_as_faults_of_this_process() {
        let before = Usage::of(std::process::id()).expect("own usage");
        let memory = vec![1u8; 64 << 20];
        let used = Usage::of(std::process::id()).expect("own usage").since(&before);
        assert!(memory.iter().step_by(4096).all(|&byte| byte == 1));
        assert!(used.minor_faults > 0 && used.max_resident_bytes >= 64 << 20, "{used:?}");
    }
}
