//! A real browser: headless Chromium and its driver, both of the machine, and axe-core, which finds what is not accessible.

use std::{fs, ops::Deref, panic::Location, path::Path, sync::LazyLock};

use reqwest::Client;
use serde::Deserialize;
use serde_json::json;
use tempfile::TempDir;
use thirtyfour::{
    By, Capabilities, ChromiumLikeCapabilities as _, DesiredCapabilities, LoggingPrefsLogLevel, WebDriver, WebElement,
    error::WebDriverResult, support::base64_decode,
};

use crate::{
    cache::on_path,
    mongosh::npm_file,
    processes::{Process, skipped},
    wait::{SOON, wait_for, wait_until},
};

const AXE: &str = "4.14.1";
/// The rules of axe that count: WCAG 2.2, levels A and AA.
const RULES: [&str; 5] = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
/// A browser that is alone: no other services, no proxy, no first steps. The pages are our own, and root has no sandbox.
const FLAGS: [&str; 12] = [
    "--headless",
    "--no-sandbox",
    "--no-proxy-server",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,800",
];

/// How a page is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Its width, in pixels of CSS.
    pub width: u32,
    /// `light` or `dark`.
    pub scheme: &'static str,
}

impl Look {
    /// On a desk and on a phone, by day and by night.
    pub const ALL: [Self; 4] = [Self::new(1280, "light"), Self::new(1280, "dark"), Self::new(380, "light"), Self::new(380, "dark")];

    const fn new(width: u32, scheme: &'static str) -> Self {
        Self { width, scheme }
    }
}

/// Whether pages may run scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scripts {
    /// As usual.
    Allowed,
    /// As somebody may have set it.
    Blocked,
}

/// A browser with a new profile. It is ended when dropped.
#[derive(Debug)]
pub struct Browser {
    // Its drop ends the browser, for which it needs chromedriver: fields are dropped in this order.
    session: WebDriver,
    _chromedriver: Process,
    _profile: TempDir,
}

impl Deref for Browser {
    type Target = WebDriver;

    fn deref(&self) -> &WebDriver {
        &self.session
    }
}

impl Browser {
    /// Opens one. `None` where Chromium or its driver is missing, which a line says.
    pub async fn open(scripts: Scripts) -> Option<Self> {
        let chromium = ["chromium", "google-chrome", "chrome"].into_iter().find_map(on_path);
        let Some((chromium, chromedriver)) = chromium.zip(on_path("chromedriver")) else {
            skipped("a test needs Chromium and chromedriver, one of which is not on PATH");
            return None;
        };
        let chromedriver = Process::start(text(&chromedriver), &["--port=0"], &[]);
        let port = async || Some(chromedriver.stdout().split_once("successfully on port ")?.1.split_once('.')?.0.to_owned());
        let at = format!("http://127.0.0.1:{}", wait_for(SOON, "chromedriver serves", port).await);
        let profile = tempfile::tempdir().expect("the temporary directory is writable");
        let wanted = capabilities(text(&chromium), text(profile.path()), scripts).expect("they are JSON");
        let client = Client::builder().no_proxy().timeout(SOON).build().expect("a client");
        let session = WebDriver::builder(at, wanted).client(client).await.expect("Chromium starts");
        Some(Self { session, _chromedriver: chromedriver, _profile: profile })
    }

    /// Shows the page from now on as on such a screen.
    pub async fn look(&self, Look { width, scheme }: Look) {
        let phone = width < 600;
        let screen = json!({ "width": width, "height": if phone { 820 } else { 800 }, "deviceScaleFactor": 2, "mobile": phone });
        // Without transitions, in whose middle axe would find colours that no one is meant to read.
        let features = json!([
            { "name": "prefers-color-scheme", "value": scheme },
            { "name": "prefers-reduced-motion", "value": "reduce" },
        ]);
        let cdp = self.cdp();
        cdp.send_raw("Emulation.setDeviceMetricsOverride", screen).await.expect("Chromium answers");
        cdp.send_raw("Emulation.setEmulatedMedia", json!({ "features": features })).await.expect("Chromium answers");
    }

    /// What axe finds wrong with the page as it is shown: the rule, how bad it is, and the elements.
    pub async fn violations(&self) -> Vec<String> {
        #[derive(Deserialize)]
        struct Violation {
            id: String,
            impact: String,
            help: String,
            nodes: Vec<String>,
        }
        // WebDriver runs a script whatever the policy of the page allows.
        static SCRIPT: LazyLock<String> = LazyLock::new(|| {
            let axe = fs::read_to_string(npm_file("axe-core", AXE, "axe.min.js")).expect("the package has this file");
            let options = json!({ "runOnly": RULES, "resultTypes": ["violations"] });
            let told = "({ id, impact, help, nodes: nodes.map(({ html, failureSummary }) => `${html} ${failureSummary}`) })";
            format!(
                "{axe}\nreturn axe.run({options}).then(({{ violations }}) => violations.map(({{ id, impact, help, nodes }}) => {told}));"
            )
        });
        let found = self.execute(&**SCRIPT, Vec::new()).await.expect("axe runs");
        let found: Vec<Violation> = found.convert().expect("axe tells it so");
        let told = |Violation { id, impact, help, nodes }: Violation| format!("{id} ({impact}): {help}:\n    {}", nodes.join("\n    "));
        found.into_iter().map(told).collect()
    }

    /// What does not fit: the page in its window, or what can be used beside other such.
    pub async fn misplaced(&self) -> Vec<String> {
        let script = r#"
            const { scrollWidth, clientWidth } = document.documentElement;
            const wide = scrollWidth > clientWidth ? [`the page is ${scrollWidth - clientWidth} pixels wider than its window`] : [];
            const all = [...document.querySelectorAll("a, button, input, textarea, summary, .who span")].filter((element) => element.checkVisibility()).map((element) => [element, [...element.getClientRects()]]);
            const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1 && one.top < other.bottom - 1 && other.top < one.bottom - 1;
            const covers = ([element, own], [next, others]) => !element.contains(next) && !next.contains(element) && own.some((one) => others.some((other) => meet(one, other)));
            const name = ([element]) => `${element.tagName} ${element.name || element.textContent}`;
            return wide.concat(all.flatMap((one, at) => all.slice(at + 1).filter((other) => covers(one, other)).map((other) => `${name(one)} covers ${name(other)}`)));"#;
        self.execute(script, Vec::new()).await.expect("it runs").convert().expect("texts")
    }

    /// What the browser has complained about since it was last asked: errors of scripts, refused by the policy, not found.
    pub async fn complaints(&self) -> Vec<String> {
        let log = self.browser_log().await.expect("chromedriver has a log");
        log.into_iter().map(|entry| format!("{}: {}", entry.level, entry.message)).collect()
    }

    /// Writes a picture of the whole page, also of what is below the window, as PNG.
    pub async fn picture(&self, to: &Path) {
        let size = "const { clientWidth: width, scrollHeight: height } = document.documentElement; return { x: 0, y: 0, width, height, scale: 1 };";
        let clip = self.execute(size, Vec::new()).await.expect("it runs").json().clone();
        let taken = self.cdp().send_raw("Page.captureScreenshot", json!({ "captureBeyondViewport": true, "clip": clip })).await;
        let taken = taken.expect("Chromium answers");
        let png = base64_decode(taken["data"].as_str().expect("a picture")).expect("base64");
        fs::write(to, png).expect("the directory is writable");
    }

    /// Waits until the content of the page has this text.
    #[track_caller]
    pub fn sees(&self, text: &str) -> impl Future<Output = ()> {
        let caller = Location::caller();
        async move {
            let shown = async || self.find(By::Tag("main")).await?.text().await;
            wait_until(SOON, &format!("{caller}: the page has {text:?}"), async || shown().await.is_ok_and(|shown| shown.contains(text)))
                .await;
        }
    }

    /// Loads the page again until it has this text.
    #[track_caller]
    pub fn sees_in_the_end(&self, text: &str) -> impl Future<Output = ()> {
        let caller = Location::caller();
        async move {
            let shown = async || {
                self.refresh().await?;
                self.find(By::Tag("main")).await?.text().await
            };
            wait_until(SOON, &format!("{caller}: the page has {text:?}"), async || shown().await.is_ok_and(|shown| shown.contains(text)))
                .await;
        }
    }

    /// Waits for a link or a button with this text, and clicks it.
    #[track_caller]
    pub fn click(&self, text: &str) -> impl Future<Output = ()> + use<'_> {
        self.click_within("", text)
    }

    /// As [`Self::click`], in the elements at this XPath.
    #[track_caller]
    pub fn click_within(&self, xpath: &str, text: &str) -> impl Future<Output = ()> + use<'_> {
        self.click_at(&format!("{xpath}//*[(self::a or self::button or self::summary) and normalize-space()='{text}']"))
    }

    /// Waits for an element at this XPath, and clicks it.
    #[track_caller]
    pub fn click_at(&self, xpath: &str) -> impl Future<Output = ()> + use<'_> {
        self.when_there(xpath.to_owned(), async |element| element.click().await)
    }

    /// Types into a field, in place of what it has.
    #[track_caller]
    pub fn fill(&self, name: &str, text: &str) -> impl Future<Output = ()> {
        self.when_there(format!("//*[@name='{name}']"), async move |field| {
            field.clear().await?;
            field.send_keys(text).await
        })
    }

    /// Repeats it until it succeeds: a page that follows events replaces its elements at any time.
    #[track_caller]
    fn when_there(&self, xpath: String, act: impl AsyncFn(WebElement) -> WebDriverResult<()>) -> impl Future<Output = ()> {
        let caller = Location::caller();
        async move {
            let acted = async || act(self.find(By::XPath(&*xpath)).await?).await;
            wait_until(SOON, &format!("{caller}: {xpath} can be used"), async || acted().await.is_ok()).await;
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of UTF-8")
}

fn capabilities(chromium: &str, profile: &str, scripts: Scripts) -> WebDriverResult<Capabilities> {
    let mut wanted = DesiredCapabilities::chrome();
    wanted.set_binary(chromium)?;
    for flag in FLAGS {
        wanted.add_arg(flag)?;
    }
    wanted.add_arg(&format!("--user-data-dir={profile}"))?;
    if scripts == Scripts::Blocked {
        wanted.add_experimental_option("prefs", json!({ "profile.managed_default_content_settings.javascript": 2 }))?;
    }
    wanted.set_browser_log_level(LoggingPrefsLogLevel::All)?;
    Ok(wanted.into())
}
