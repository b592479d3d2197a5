//! The command that settles a migration on this host, whole: with the options by which this side was started, so that it works when it is pasted.

use std::path::PathBuf;

use sterna_wire::identity::MigrationId;

use crate::args::{StateArgs, TlsAllowArgs, TlsArgs};

/// How reports and errors name the command.
const SHORT: &str = "`sterna recover ";

/// The options of `sterna recover` for the migrations of this side.
pub(super) struct RecoverCommand {
    words: Vec<String>,
}

impl RecoverCommand {
    pub(super) fn of_source(state: &StateArgs, tls: &TlsArgs) -> Self {
        let TlsArgs { tls, tls_server_name, insecure } = tls;
        let mut command = Self::new(state, tls.as_ref(), *insecure);
        command.add("--tls-server-name", tls_server_name);
        command
    }

    pub(super) fn of_destination(state: &StateArgs, tls: &TlsAllowArgs) -> Self {
        let TlsAllowArgs { tls, allow, insecure } = tls;
        let mut command = Self::new(state, tls.as_ref(), *insecure);
        command.add("--allow", allow);
        command
    }

    /// Without the options of a connection, for records that do not say how they were made.
    pub(super) fn of_any(state: &StateArgs) -> Self {
        Self::new(state, None, false)
    }

    fn new(state: &StateArgs, tls: Option<&PathBuf>, insecure: bool) -> Self {
        let mut command = Self { words: Vec::new() };
        // `recover` may be started in another directory.
        let absolute = |dir: &PathBuf| std::path::absolute(dir).unwrap_or_else(|_| dir.clone()).display().to_string();
        command.add("--state-dir", state.state_dir.as_ref().map(absolute).iter());
        command.add("--tls", tls.map(absolute).iter());
        command.words.extend(insecure.then(|| "--insecure".to_owned()));
        command
    }

    fn add<'a>(&mut self, option: &str, values: impl IntoIterator<Item = &'a String>) {
        self.words.extend(values.into_iter().flat_map(|value| [option.to_owned(), value.clone()]));
    }

    /// Returns `text`; if it names the command for a migration, followed by a line with that command as it is to be given on this host.
    pub(super) fn after(&self, text: String) -> String {
        match named(&text) {
            Some(id) => format!("{text}\nOn this host: {}", self.line(id)),
            None => text,
        }
    }

    /// Returns the command for this migration.
    pub(super) fn line(&self, id: MigrationId) -> String {
        let id = id.to_string();
        let words = ["sterna", "recover", &id].into_iter().chain(self.words.iter().map(String::as_str));
        // Of words without a zero byte, which no argument of a program has.
        shlex::try_join(words).unwrap_or_default()
    }
}

/// Returns the migration for which a text names the command, as it is for this host.
fn named(text: &str) -> Option<MigrationId> {
    text.split(SHORT).skip(1).find_map(|rest| rest.split_once('`')?.0.parse().ok())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    const ID: &str = "000102030405060708090a0b0c0d0e0f";

    fn command(line: &str) -> RecoverCommand {
        match Cli::try_parse_from(shlex::split(line).unwrap()).unwrap().command {
            Command::Send(args) => RecoverCommand::of_source(&args.state, &args.tls),
            Command::Receive(args) => RecoverCommand::of_destination(&args.state, &args.tls),
            _ => panic!("no side of a migration: {line}"),
        }
    }

    #[test]
    fn the_command_has_the_options_of_its_side_and_is_parsed_as_it_is_printed() {
        for (line, options) in [
            ("sterna send --qmp q --to h:1 --insecure", "--insecure"),
            ("sterna send --qmp q --to h:1 --tls /c --tls-server-name b", "--tls /c --tls-server-name b"),
            (
                "sterna receive --qmp q --listen h:1 --tls /c --allow a --allow 'b c' --state-dir '/my records'",
                "--state-dir '/my records' --tls /c --allow a --allow 'b c'",
            ),
        ] {
            let text = command(line).after(format!("not settled: run `sterna recover {ID}` on both hosts"));
            let printed = text.lines().last().unwrap();
            assert_eq!(printed, format!("On this host: sterna recover {ID} {options}"));
            let words = shlex::split(printed.strip_prefix("On this host: ").unwrap()).unwrap();
            assert!(matches!(Cli::try_parse_from(words).unwrap().command, Command::Recover(_)));
        }
    }

    #[test]
    fn a_directory_is_named_by_its_whole_path() {
        let text = command("sterna send --qmp q --to h:1 --tls c --state-dir s").line(ID.parse().unwrap());
        let here = std::env::current_dir().unwrap();
        let [state, certificates] = ["s", "c"].map(|name| here.join(name).display().to_string());
        assert!(text.contains(&state) && text.contains(&certificates), "{text}");
    }

    #[test]
    fn a_text_that_names_no_migration_to_settle_stays_as_it_is() {
        let command = command("sterna send --qmp q --to h:1 --insecure");
        for text in ["completed", "run `sterna recover`", "run `sterna recover ID` on both hosts"] {
            assert_eq!(command.after(text.to_owned()), text);
        }
    }
}
