//! What the kernel's command line tells the guest: words of the form `sterna.NAME=VALUE`.

use std::ops::RangeInclusive;

use sterna_guest::memory::Pattern;
use sterna_guest::page::Fill;

use crate::disks::Load;

/// The guest's settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `sterna.fill`: what memory is filled with. Corpus if not given.
    pub fill: Fill,
    /// `sterna.memory`: bytes to fill; if not given, three quarters of what is free.
    pub memory: Option<u64>,
    /// `sterna.dirty-rate`: bytes a second that are written after filling, in whole pages. 0 if not given.
    pub dirty_rate: u64,
    /// `sterna.dirty=page|stamp`: rewrite whole pages, or only their stamp. Pages if not given.
    pub dirty_whole: bool,
    /// `sterna.dirty-span`: bytes, from the first, that are ever written again; if not given, all.
    pub dirty_span: Option<u64>,
    /// `sterna.pattern`: the order in which pages are written. Random if not given.
    pub pattern: Pattern,
    /// `sterna.verify`: bytes a second that are verified all the while; 0 is off. 8 MiB if not given.
    pub verify_rate: u64,
    /// `sterna.share`: the tag of a directory that the host shares, in which the guest works with files.
    pub share: Option<String>,
    /// `sterna.deleted=on|off`: there also with a file that was deleted while it is open. Off if not given.
    pub deleted: bool,
    /// `sterna.balloon=on|off`: has the kernel's module for a balloon, so that the host can ask for memory, of which most was used before.
    /// Off if not given.
    pub balloon: bool,
    /// `sterna.disks`: how many disks, from `/dev/vda` on, the guest reads, writes and verifies; 0 if not given, 8 at most.
    /// `sterna.disk-buffers`: bytes of memory that they are read into. 64 MiB if not given.
    /// `sterna.disk-threads`: threads for each disk. 4 if not given.
    /// `sterna.disk-rate`: bytes a second that are read and written. 16 MiB if not given.
    pub disks: Load,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            fill: Fill::Corpus,
            memory: None,
            dirty_rate: 0,
            dirty_whole: true,
            dirty_span: None,
            pattern: Pattern::Random,
            verify_rate: 8 << 20,
            share: None,
            deleted: false,
            balloon: false,
            disks: Load { disks: 0, buffers: 64 << 20, threads: 4, rate: 16 << 20 },
        }
    }
}

impl Settings {
    /// Reads the settings in a kernel command line; words of others are left alone.
    ///
    /// # Errors
    /// The first word that begins with `sterna.` and is not understood, with what would be.
    pub fn parse(command_line: &str) -> Result<Settings, String> {
        let mut settings = Settings::default();
        for word in command_line.split_whitespace() {
            let Some((name, value)) =
                word.strip_prefix("sterna.").map(|rest| rest.split_once('=').unwrap_or((rest, "")))
            else {
                continue;
            };
            match name {
                "fill" => settings.fill = choice(word, value, &Fill::ALL)?,
                "pattern" => settings.pattern = choice(word, value, &Pattern::ALL)?,
                "memory" => settings.memory = Some(size(value).ok_or_else(|| not_a_size(word))?),
                "dirty-rate" => settings.dirty_rate = size(value).ok_or_else(|| not_a_size(word))?,
                "dirty-span" => settings.dirty_span = Some(size(value).ok_or_else(|| not_a_size(word))?),
                "dirty" => settings.dirty_whole = choice(word, value, &[("page", true), ("stamp", false)])?,
                "verify" => settings.verify_rate = size(value).ok_or_else(|| not_a_size(word))?,
                "share" => settings.share = Some(value.to_owned()),
                "disks" => settings.disks.disks = number(word, value, 0..=8)? as u8,
                "disk-buffers" => settings.disks.buffers = size(value).ok_or_else(|| not_a_size(word))?,
                "disk-threads" => settings.disks.threads = number(word, value, 1..=64)?,
                "disk-rate" => settings.disks.rate = size(value).ok_or_else(|| not_a_size(word))?,
                "balloon" => settings.balloon = choice(word, value, &[("on", true), ("off", false)])?,
                "deleted" => settings.deleted = choice(word, value, &[("on", true), ("off", false)])?,
                _ => return Err(format!("{word}: no such setting")),
            }
        }
        Ok(settings)
    }
}

fn choice<T: Copy>(word: &str, value: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let found = choices.iter().find(|(name, _)| *name == value).map(|&(_, choice)| choice);
    found.ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|&(name, _)| name).collect();
        format!("{word}: expected one of {}", names.join(", "))
    })
}

fn number(word: &str, value: &str, range: RangeInclusive<u64>) -> Result<u64, String> {
    let found = value.parse().ok().filter(|number| range.contains(number));
    found.ok_or_else(|| format!("{word}: expected a number from {} to {}", range.start(), range.end()))
}

fn not_a_size(word: &str) -> String {
    format!("{word}: expected bytes, as 4096, 512K, 20M or 2G")
}

/// Bytes, as `4096`, `512K`, `20M` or `2G` (powers of 1024).
pub fn size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'K' | 'k') => (&text[..at], 10),
        (at, 'M' | 'm') => (&text[..at], 20),
        (at, 'G' | 'g') => (&text[..at], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_read_and_the_kernels_own_words_are_left_alone() {
        let line = "console=ttyS0 quiet sterna.fill=mixed sterna.memory=512M sterna.dirty-rate=20M sterna.pattern=hot \
                    sterna.verify=0 sterna.dirty=stamp sterna.dirty-span=64K sterna.share=data panic=-1 \
                    sterna.disks=2 sterna.disk-buffers=8M sterna.disk-threads=3 sterna.disk-rate=1M";
        let expected = Settings {
            fill: Fill::Mixed,
            memory: Some(512 << 20),
            dirty_rate: 20 << 20,
            dirty_whole: false,
            dirty_span: Some(64 << 10),
            pattern: Pattern::Hot,
            verify_rate: 0,
            share: Some("data".into()),
            deleted: false,
            balloon: false,
            disks: Load { disks: 2, buffers: 8 << 20, threads: 3, rate: 1 << 20 },
        };
        assert_eq!(Settings::parse(line), Ok(expected));
        assert_eq!(Settings::parse("console=ttyS0"), Ok(Settings::default()));
    }

    #[test]
    fn a_wrong_word_is_named() {
        for (line, part) in [
            ("sterna.fill=snow", "zeros, ones"),
            ("sterna.memory=lots", "expected bytes"),
            ("sterna.disks=9", "from 0 to 8"),
            ("sterna.disk-threads=0", "from 1 to 64"),
            ("sterna.colour=red", "no such setting"),
            ("sterna.memory=99999999999999G", "expected bytes"),
        ] {
            let error = Settings::parse(line).expect_err(line);
            assert!(error.starts_with(line) && error.contains(part), "{error}");
        }
    }
}
