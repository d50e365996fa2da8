//! Who may do what: tokens and people in a file, each with a role, and requests that a browser makes for another page.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    net::IpAddr,
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use axum::{
    Router,
    extract::{Request, State},
    http::{
        HeaderMap, Uri,
        header::{AUTHORIZATION, HOST, HeaderName, ORIGIN},
    },
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use clap::ValueEnum;
use recruiter_common::{exit::Exit, shutdown::pause};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;

use super::{Web, password, problem::Problem};

/// What a client may do. Each role may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Role {
    /// Read everything
    Viewer,
    /// Also enqueue jobs, and work
    Client,
    /// Also change and delete what is there
    Operator,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Viewer => "viewer",
            Self::Client => "client",
            Self::Operator => "operator",
        })
    }
}

/// What a request without a token may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Anonymous {
    /// Nothing
    Nobody,
    /// Read everything
    Viewer,
    /// Also enqueue jobs, and work
    Client,
    /// Also change and delete what is there
    Operator,
}

impl Anonymous {
    fn role(self) -> Option<Role> {
        match self {
            Self::Nobody => None,
            Self::Viewer => Some(Role::Viewer),
            Self::Client => Some(Role::Client),
            Self::Operator => Some(Role::Operator),
        }
    }
}

/// A SHA-256.
type Hash = [u8; 32];

/// Who a request is from.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// That of its token, or of the person. `None` without a token.
    name: Option<Arc<str>>,
    pub(super) role: Role,
}

impl Caller {
    pub(super) fn new(name: Option<Arc<str>>, role: Role) -> Self {
        Self { name, role }
    }

    /// The name of its token, or of the person.
    pub(super) fn given_name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// For logs.
    pub(super) fn name(&self) -> &str {
        self.name.as_deref().unwrap_or("without a token")
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "the token `{name}` has the role `{}`", self.role),
            None => write!(f, "a request without a token has the role `{}`: send `Authorization: Bearer TOKEN`", self.role),
        }
    }
}

/// Until when somebody may read: they log out, or the time of their session is over.
#[derive(Clone, Debug)]
pub(super) struct Until {
    ended: CancellationToken,
    pub(super) left: Duration,
}

impl Until {
    pub(super) fn new(ended: CancellationToken, left: Duration) -> Self {
        Self { ended, left }
    }

    /// Waits for the end of the session.
    pub(super) async fn reached(self) {
        tokio::select! {
            () = self.ended.cancelled() => {}
            () = pause(self.left) => {}
        }
    }
}

/// The file of tokens and people.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tokens {
    #[serde(default)]
    tokens: BTreeMap<String, Token>,
    #[serde(default)]
    people: BTreeMap<String, Person>,
}

/// Somebody who logs in: what they may do, and the hash of their password.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Person {
    role: Role,
    password: password::Hash,
}

/// A token: what it may do, and the SHA-256 of its text in hexadecimal digits.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    role: Role,
    #[serde(deserialize_with = "hash")]
    sha256: Hash,
}

fn hash<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
    let text = String::deserialize(from)?;
    let bytes = hex::decode(text.trim()).ok().and_then(|bytes| Hash::try_from(bytes).ok());
    bytes.ok_or_else(|| serde::de::Error::custom("sha256 has 64 hexadecimal digits; `recruiter web token` prints them"))
}

/// Who may do what.
#[derive(Debug)]
pub(super) struct Access {
    tokens: HashMap<Hash, (Arc<str>, Role)>,
    people: BTreeMap<String, Person>,
    anonymous: Option<Role>,
}

impl Access {
    /// # Errors
    /// When the file cannot be used, or gives two names to one token.
    pub(super) fn of(file: Option<&Path>, anonymous: Option<Anonymous>) -> anyhow::Result<Self> {
        let (mut tokens, mut people) = (HashMap::new(), BTreeMap::new());
        if let Some(path) = file {
            let read = read(path)?;
            people = read.people;
            if let Some(name) = people.keys().find(|name| read.tokens.contains_key(*name)) {
                let problem =
                    format!("{}: a token and a person have the name `{name}`, and the audit could not tell them apart", path.display());
                return Err(anyhow::anyhow!(problem).context(Exit::Config));
            }
            for (name, Token { role, sha256 }) in read.tokens {
                if let Some((other, _)) = tokens.insert(sha256, (Arc::from(&*name), role)) {
                    let problem = format!("{}: the tokens `{other}` and `{name}` are the same", path.display());
                    return Err(anyhow::anyhow!(problem).context(Exit::Config));
                }
            }
        }
        let usual = if file.is_some() { Anonymous::Nobody } else { Anonymous::Viewer };
        Ok(Self { tokens, people, anonymous: anonymous.unwrap_or(usual).role() })
    }

    pub(super) fn anonymous(&self) -> Option<Role> {
        self.anonymous
    }

    /// The most that anybody may.
    pub(super) fn highest(&self) -> Option<Role> {
        let people = self.people.values().map(|person| person.role);
        self.tokens.values().map(|(_, role)| *role).chain(people).chain(self.anonymous).max()
    }

    /// Whether anybody can log in.
    pub(super) fn has_people(&self) -> bool {
        !self.people.is_empty()
    }

    /// The person with this name.
    pub(super) fn person(&self, name: &str) -> Option<(&str, Role, &password::Hash)> {
        self.people.get_key_value(name).map(|(name, person)| (&**name, person.role, &person.password))
    }

    /// A link on the page of another site may be followed if `may_follow`.
    ///
    /// # Errors
    /// When the request comes from the page of another site.
    pub(super) fn check_page(&self, headers: &HeaderMap, may_follow: bool) -> Result<(), Problem> {
        const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
        const MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
        let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let host = text(HOST).unwrap_or_default();
        let is_own =
            |origin: &str| origin.parse().is_ok_and(|uri: Uri| uri.authority().is_some_and(|authority| authority.as_str() == host));
        let follows = may_follow && text(MODE) == Some("navigate") && !headers.contains_key(ORIGIN);
        let is_other_site = !follows && text(SITE).is_some_and(|site| !matches!(site, "same-origin" | "none"));
        if is_other_site || text(ORIGIN).is_some_and(|origin| !is_own(origin)) {
            return Err(Problem::forbidden("the request comes from the page of another site"));
        }
        Ok(())
    }

    /// # Errors
    /// When there is no such token, or none where one is needed: also where the page of another site could be the one that asks, under a name
    /// of its own that leads to this machine (DNS rebinding).
    pub(super) fn caller(&self, headers: &HeaderMap) -> Result<Caller, Problem> {
        let Some(given) = headers.get(AUTHORIZATION) else {
            let role = self.anonymous.ok_or_else(|| Problem::unauthorized("send `Authorization: Bearer TOKEN`"))?;
            let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
            if !is_own_name(host) {
                let problem = format!("without a token, the API is used by its IP address or as localhost, not as `{host:.100}`");
                return Err(Problem::forbidden(problem));
            }
            return Ok(Caller { name: None, role });
        };
        let words = given.to_str().ok().and_then(|given| given.split_once(' '));
        let Some((_, token)) = words.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
            return Err(Problem::unauthorized("the header Authorization must be `Bearer TOKEN`"));
        };
        // By its hash: how long the comparison takes says nothing about the token.
        let known = self.tokens.get(&Hash::from(Sha256::digest(token.trim())));
        let (name, role) = known.ok_or_else(|| Problem::unauthorized("no token in the file of --tokens is this one"))?;
        Ok(Caller { name: Some(name.clone()), role: *role })
    }
}

/// Lets only those pass who have at least this role.
pub(super) fn for_role(role: Role, web: &Arc<Web>, routes: Router<Arc<Web>>) -> Router<Arc<Web>> {
    routes.route_layer(from_fn_with_state((web.clone(), role), check_role))
}

async fn check_role(State((web, role)): State<(Arc<Web>, Role)>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let caller = web.access.caller(request.headers())?;
    if caller.role < role {
        return Err(Problem::forbidden(format!("this needs the role `{role}`, and {caller}")));
    }
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

fn read(path: &Path) -> anyhow::Result<Tokens> {
    let problem = || format!("the file of tokens {} cannot be used (--tokens, RECRUITER_WEB_TOKENS)", path.display());
    let text = std::fs::read_to_string(path).with_context(problem).context(Exit::Config)?;
    toml::from_str(&text).with_context(problem).context(Exit::Config)
}

/// Refuses what a browser sends for the page of another site, which could ask an API on its reader's own machine.
pub(super) async fn refuse_other_pages(State(web): State<Arc<Web>>, request: Request, next: Next) -> Result<Response, Problem> {
    web.access.check_page(request.headers(), false)?;
    Ok(next.run(request).await)
}

/// Where a request comes from. A proxy adds the address of its client at the end of what the client has sent.
pub(super) fn address(web: &Web, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
    let told = headers.get_all("x-forwarded-for").iter().next_back().and_then(|told| told.to_str().ok());
    let client = told.and_then(|told| told.rsplit(',').next()?.trim().parse().ok());
    client.filter(|_| web.is_behind_proxy).unwrap_or(peer)
}

/// Whether a value of `Host` cannot be a name that somebody else has made.
fn is_own_name(host: &str) -> bool {
    let Ok(uri) = host.parse::<Uri>() else { return false };
    let name = uri.host().unwrap_or_default();
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_an_address_or_this_machine() {
        for (host, expected) in [
            ("127.0.0.1:7420", true),
            ("[::1]:7420", true),
            ("localhost", true),
            ("LOCALHOST:80", true),
            ("192.168.0.1", true),
            ("example.org:7420", false),
            ("localhost.example.org", false),
            ("127.0.0.1.example.org", false),
            ("", false),
            ("a b", false),
        ] {
            assert_eq!(is_own_name(host), expected, "{host}");
        }
    }

    #[tokio::test]
    async fn a_session_is_over_when_its_time_is() {
        Until::new(CancellationToken::new(), Duration::ZERO).reached().await;
    }

    #[test]
    fn a_role_may_do_what_those_before_it_may() {
        assert!(Role::Viewer < Role::Client && Role::Client < Role::Operator && Some(Role::Viewer) > None);
    }
}
