//! The flags of `recruiter web`.

use std::{net::SocketAddr, path::PathBuf};

use anyhow::anyhow;
use clap::{Args, Subcommand, builder::BoolishValueParser};
use recruiter_common::{exit::Exit, monitoring::MetricsArgs};
use tokio::net::TcpListener;

use super::{
    access::{Access, Anonymous, Role},
    person::PasswordArgs,
    token::TokenArgs,
};

/// The arguments of `web`.
#[derive(Args, Clone, Debug)]
pub struct WebArgs {
    #[command(subcommand)]
    pub(super) command: Option<WebCommand>,
    /// Address of the API and the pages. Without encryption: use a loopback address, or a proxy with TLS in front
    #[arg(long, env = "RECRUITER_WEB_LISTEN", value_name = "HOST:PORT", default_value = "127.0.0.1:7420")]
    pub(super) listen: String,
    /// TOML file with the tokens of programs and the passwords of people, and what each may do; `recruiter web token` and `recruiter web
    /// password` make them [default: none]
    #[arg(long, env = "RECRUITER_WEB_TOKENS", value_name = "FILE")]
    pub(super) tokens: Option<PathBuf>,
    /// What a request without a token may do [default: viewer without --tokens, nobody with it]
    #[arg(long, env = "RECRUITER_WEB_ANONYMOUS", value_name = "ROLE")]
    pub(super) anonymous: Option<Anonymous>,
    /// A proxy with TLS is in front: cookies are sent over TLS only, and its X-Forwarded-For names the client
    #[arg(long, env = "RECRUITER_WEB_BEHIND_PROXY", value_parser = BoolishValueParser::new())]
    pub(super) behind_proxy: bool,
    /// Where metrics are served.
    #[command(flatten)]
    pub(super) metrics: MetricsArgs,
}

impl WebArgs {
    /// Whether it keeps running.
    pub(crate) fn serves(&self) -> bool {
        self.command.is_none()
    }

    /// Checks the values, and the file of tokens.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        self.access().map(drop)
    }

    pub(super) fn access(&self) -> anyhow::Result<Access> {
        Access::of(self.tokens.as_deref(), self.anonymous)
    }

    pub(super) async fn listen(&self) -> anyhow::Result<TcpListener> {
        TcpListener::bind(&self.listen).await.map_err(|error| {
            anyhow!(
                "cannot serve the API at {} (--listen, RECRUITER_WEB_LISTEN): {error}; give a free address of this machine",
                self.listen
            )
        })
    }

    /// Refuses to let the whole network change jobs.
    pub(super) fn check_open(&self, at: SocketAddr, access: &Access) -> anyhow::Result<()> {
        if at.ip().is_loopback() || access.anonymous() < Some(Role::Client) {
            return Ok(());
        }
        let problem = format!(
            "everyone who reaches {at} could enqueue and change jobs without a token: give --tokens and no --anonymous, or listen at 127.0.0.1"
        );
        Err(anyhow!(problem).context(Exit::Usage))
    }
}

/// What is done in place of serving.
#[derive(Subcommand, Clone, Debug)]
pub(super) enum WebCommand {
    /// Make a token, and write what belongs into the file of --tokens
    Token(TokenArgs),
    /// Read a password, and write what belongs into the file of --tokens
    Password(PasswordArgs),
}
